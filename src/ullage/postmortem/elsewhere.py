"""Tensors that a job of this model makes outside the step that was asked for: in loading, in saving, or were a setting not what it says."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ullage.dtypes import size_bytes
from ullage.frozen import replace
from ullage.job.bind import local_sizes
from ullage.job.job import Job
from ullage.memory.program import round_up
from ullage.memory.rank import Rank
from ullage.model.graph import BATCH, SEQ, Graph
from ullage.postmortem.causes import Kind
from ullage.postmortem.tensors import Made

_HALF, _SINGLE = "bf16", "fp32"
_NAMES = {_HALF: "16 bits", _SINGLE: "fp32"}


def elsewhere(job: Job, graph: Graph, rank: Rank) -> Iterator[Made]:
    """Each in 16 and in 32 bits, the sizes rounded as the allocator rounds."""
    sizes = {name: size for name, size in local_sizes(graph, job.layout, job.data).items() if isinstance(size, int)}
    yield from _logits(job, sizes)
    yield from _scores(job, sizes)
    yield from _whole(job, rank)
    yield from _single(job, rank)


def _logits(job: Job, sizes: dict[str, int]) -> Iterator[Made]:
    if "vocab" not in sizes:
        return
    shape = (sizes[BATCH], sizes[SEQ], sizes["vocab"])
    quiet = job.loss.kind in ("fused-linear", "chunked")
    note = f", which a {job.loss.kind} loss never makes: it is then not in effect" if quiet else ""
    for dtype in (_HALF, _SINGLE):
        yield Made(
            kind="logits",
            category="activations",
            what=f"logits in {_NAMES[dtype]}",
            bytes=_bytes(math.prod(shape), dtype),
            moment="forward of head, or its backward",
            shape=shape,
            note=f"micro-batch x tokens x vocabulary{note}",
            against=quiet,
        )


def _scores(job: Job, sizes: dict[str, int]) -> Iterator[Made]:
    batch, seq, heads = sizes[BATCH], job.data.seq_len, sizes.get("heads", 0)
    quiet = job.attention not in ("eager", "math")
    note = f"micro-batch x heads x tokens x tokens, which {job.attention} attention never makes" if quiet else ""
    for dtype in (_HALF, _SINGLE):
        yield Made(
            kind="attention-scores",
            category="activations",
            what=f"attention scores in {_NAMES[dtype]}",
            bytes=_bytes(batch * heads * seq * seq, dtype),
            moment="attention of a layer",
            shape=(batch, heads, seq, seq),
            note=note,
            against=quiet,
        )
        yield Made(
            kind="padding-mask",
            category="input",
            what=f"attention mask in {_NAMES[dtype]}",
            bytes=_bytes(batch * seq * seq, dtype),
            moment="before the first layer",
            shape=(batch, 1, seq, seq),
            note="micro-batch x tokens x tokens",
        )


def _whole(job: Job, rank: Rank) -> Iterator[Made]:
    """All parameters of this rank in one tensor, as a flat copy is, and a rank's share of it; all experts' in one, as Megatron's buffer
    of what expert parallelism divides is apart from the others' (adapters aside, which are loaded on their own)."""
    numel = rank.numel()
    experts = sum(one.total for one in rank.params if one.expert and (job.lora is None or not one.param.trainable))
    shards = job.engine.shard_group or job.layout.dp * job.layout.cp
    for dtype in (_HALF, _SINGLE):
        kind: Kind = "replica-not-shard" if job.layout.world > 1 else "states"
        yield _flat(f"all parameters in one tensor of {_NAMES[dtype]}", numel, dtype, f"{numel} elements", kind)
        if shards > 1:
            yield replace(
                _flat(
                    f"one of {shards} shares of all parameters in {_NAMES[dtype]}",
                    -(-numel // shards),
                    dtype,
                    f"{numel} / {shards} elements",
                ),
                category="optimizer",
                moment="the engine's start, or the optimizer's step",
            )
        if experts:
            note = f"{experts} elements of this rank's experts"
            yield _flat(f"all experts' parameters in one tensor of {_NAMES[dtype]}", experts, dtype, note)


def _flat(what: str, numel: int, dtype: str, note: str, kind: Kind = "states") -> Made:
    """Parameters put together."""
    return Made(
        kind=kind,
        category="parameters",
        what=what,
        bytes=_bytes(numel, dtype),
        moment="loading, or the engine's start",
        shape=(numel,),
        note=note,
    )


def _single(job: Job, rank: Rank) -> Iterator[Made]:
    """Each parameter, and each block's parameters together: gathered, dequantised or cloned.

    FSDP gathers for computing in the compute type; a whole parameter in the wider type of its shards is made for a full state dict.
    """
    cloned = job.engine.name in ("fsdp1", "fsdp2") and job.precision.params == "fp32" != job.precision.compute
    blocks: dict[str, int] = {}
    for one in rank.params:
        blocks[one.block.name] = blocks.get(one.block.name, 0) + one.numel
        dims = one.param.dims
        for dtype in (_HALF, _SINGLE):
            saved = cloned and dtype == _SINGLE
            yield Made(
                kind="save" if saved else "states",
                category="gathered",
                what=f"{one.name} in {_NAMES[dtype]}",
                bytes=_bytes(one.numel, dtype),
                moment="a full state dict" if saved else "gathered, dequantised or copied",
                shape=tuple(dim for dim in dims if isinstance(dim, int))
                if all(isinstance(d, int) for d in dims)
                else (one.numel,),
            )
    for name, numel in blocks.items():
        for dtype in (_HALF, _SINGLE):
            yield Made(
                kind="states",
                category="gathered",
                what=f"all parameters of one {name} in {_NAMES[dtype]}",
                bytes=_bytes(numel, dtype),
                moment="gathered",
                shape=(numel,),
            )


def _bytes(numel: int, dtype: str) -> int:
    return round_up(size_bytes(numel, dtype))
