"""Weights that Transformer Engine keeps in 8 or 4 bits: of every linear of the layers, beside the parameter or in its place."""

from __future__ import annotations

from ullage.engines.base import sized
from ullage.engines.megatron.fsdp import PARAMETERS_SHARDED, shards
from ullage.job.job import Job
from ullage.kernels.narrow import DEFAULT, SCALE_BYTES, orders, stays_wide
from ullage.memory.program import Item
from ullage.memory.rank import Rank


def names(job: Job, rank: Rank) -> frozenset[str]:
    """The weights of Transformer Engine's linears that multiply in fewer bits."""
    if job.precision.compute not in ("fp8", "fp4") or job.engine.options.get("transformer_impl") == "local":
        return frozenset()
    return frozenset(
        f"{run.block.name}.{op.params[0].name}"
        for part in rank.chunks
        for run in part.runs
        for op in run.block.ops
        if op.params and not stays_wide(op)
    )


def weights(job: Job, rank: Rank) -> list[Item]:
    """A TE linear keeps its weight as it multiplies it, by rows and by columns, with its scales: beside the bf16 one, or as the parameter
    itself.

    Sources: TransformerEngine pytorch/module/base.py, get_weight_workspace; Megatron-FSDP divides parameters of either kind.
    """
    mine = names(job, rank)
    found = []
    dtype = job.precision.compute
    recipe = "nvfp4" if dtype == "fp4" else str(job.engine.options.get("fp8_recipe") or DEFAULT)
    kept = orders(recipe, job.cluster.device.compute_capability)
    for order in kept if mine else ():
        for expert in (False, True):
            numel = sum(local.total for local in rank.params if local.name in mine and local.expert == expert)
            divided = job.precision.fp8_params and job.engine.zero_stage >= PARAMETERS_SHARDED
            of = f"by {order} ({'experts' if expert else 'dense'})"
            over = shards(job, expert) if divided else 1
            if numel:
                lives = "from the first micro-batch on"
                found.append(sized("parameters", f"weights in {dtype}, {of}", numel, dtype, shards=over, lives=lives))
                if scales := round(numel * SCALE_BYTES.get(recipe, 0)):
                    found.append(sized("parameters", f"their scales, {of}", scales, "uint8", shards=over, lives=lives))
    return found
