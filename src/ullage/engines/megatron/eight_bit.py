"""Weights that Transformer Engine keeps in 8 bits: of every linear of the layers, beside the parameter or in its place."""

from __future__ import annotations

from ullage.engines.base import sized
from ullage.engines.megatron.fsdp import PARAMETERS_SHARDED, shards
from ullage.job.job import Job
from ullage.kernels.narrow import DEFAULT, HEAD, MATRICES, orders
from ullage.memory.program import Item
from ullage.memory.rank import Rank


def names(job: Job, rank: Rank) -> frozenset[str]:
    """The weights of Transformer Engine's linears, where they multiply in 8 bits."""
    if job.precision.compute != "fp8" or job.engine.options.get("transformer_impl") == "local":
        return frozenset()
    return frozenset(
        f"{run.block.name}.{op.params[0].name}"
        for part in rank.chunks
        for run in part.runs
        for op in run.block.ops
        if op.kind in MATRICES and op.params and not op.name.endswith(HEAD)
    )


def weights(job: Job, rank: Rank) -> list[Item]:
    """In fp8 every TE linear keeps its weight quantised, by rows and by columns: beside the bf16 one, or as the parameter itself.

    Sources: TransformerEngine pytorch/module/base.py, get_weight_workspace; Megatron-FSDP divides parameters of either kind.
    """
    mine = names(job, rank)
    found = []
    kept = orders(str(job.engine.options.get("fp8_recipe") or DEFAULT), job.cluster.device.compute_capability)
    for order in kept if mine else ():
        for expert in (False, True):
            numel = sum(local.total for local in rank.params if local.name in mine and local.expert == expert)
            divided = job.precision.fp8_params and job.engine.zero_stage >= PARAMETERS_SHARDED
            what = f"weights in fp8, by {order} ({'experts' if expert else 'dense'})"
            over = shards(job, expert) if divided else 1
            if numel:
                lives = "from the first micro-batch on"
                found.append(sized("parameters", what, numel, "fp8", shards=over, lives=lives))
    return found
