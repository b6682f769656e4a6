"""What FSDP2 keeps the whole run: shards, the optimizer's moments, and the small things beside them."""

from __future__ import annotations

from ullage import dtypes
from ullage.engines.base import sized
from ullage.engines.fsdp2.policy import Units, types_of
from ullage.engines.fsdp2.units import COMPUTE_STREAM, Shape, Unit
from ullage.hardware import overheads
from ullage.job.job import Job
from ullage.memory.program import Item, Node, Sequence, alloc, free, round_up
from ullage.memory.rank import Rank

Counted = tuple[Item, int]

MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "adamw-8bit": 2, "paged-adamw-8bit": 2}


def shapes_on(rank: Rank, units: list[Units]) -> list[tuple[Shape, int]]:
    """Every parameter of the rank with how many blocks hold one like it."""
    counts: dict[str, int] = {param.name: param.copies for param in rank.params}
    seen: dict[str, Shape] = {}
    for one in units:
        for unit in ([one.root] if one.root is not None else []) + list(one.of.values()):
            for shape in unit.shapes:
                seen.setdefault(shape.name, shape)
    return [(shape, counts[name]) for name, shape in seen.items()]


def states(job: Job, rank: Rank, units: list[Units]) -> list[Counted]:
    """Each parameter's padded shard and its moments, each an allocation of its own."""
    types = types_of(job)
    found: list[Counted] = []
    on_device = job.offload.params == "none"
    for shape, copies in shapes_on(rank, units):
        if on_device:
            found.append((_shard(f"shard of {shape.name}", "parameters", shape, types.original), copies))
        if on_device and job.offload.optimizer == "none":
            for moment in ("exp_avg", "exp_avg_sq")[: MOMENTS.get(job.optimizer.name, 2)]:
                dtype = job.optimizer.state if job.optimizer.state != "fp32" else types.original
                found.append((_shard(f"{moment} of {shape.name}", "optimizer", shape, dtype), copies))
    return found


def _shard(what: str, category: str, shape: Shape, dtype: str) -> Item:
    return Item(
        category=category,
        what=what,
        bytes=round_up(dtypes.size_bytes(shape.padded, dtype)),
        formula=f"ceil({shape.rows} rows / {shape.shards}) x {shape.columns} x {dtypes.bits(dtype) / 8:g} B ({dtype})",
        lives="the whole run",
    )


def beside(job: Job, head_dim: int) -> list[Counted]:
    """Batch, rotary table, cuBLAS workspace."""
    data, layout = job.data, job.layout
    tokens = data.seq_len * data.micro_batch
    cublas = overheads.cublas_workspace_bytes(job.cluster.device)
    return [
        (sized("input", "token ids and labels", 2 * tokens, "int64", why="the whole sequence before context parallelism"), 1),
        (
            sized("buffers", "rotary table", data.seq_len * head_dim, "fp32", shards=layout.cp, why="complex64, half the head"),
            1,
        ),
        (
            Item(
                category="workspace",
                what=cublas.what,
                bytes=round_up(cublas.bytes),
                formula=cublas.source,
                provenance=cublas.provenance,
                lives="from the first matmul on",
            ),
            1,
        ),
    ]


def optimizer_step(job: Job, rank: Rank, units: list[Units]) -> Node:
    """AdamW's temporaries: fused none; foreach one list as large as the shards; for-loop three of the largest shard."""
    types = types_of(job)
    if job.optimizer.impl == "fused" or not job.optimizer.name.startswith("adam") or job.offload.params != "none":
        return Sequence([], "optimizer step")
    shapes = shapes_on(rank, units)
    if job.optimizer.impl == "foreach":
        items = [(_temporary(shape, types.original), copies) for shape, copies in shapes]
        allocs = [alloc(item, copies) for item, copies in items]
        return Sequence([*allocs, *(free(item, copies) for item, copies in items)], "optimizer step")
    largest = max((shape for shape, _ in shapes), key=lambda shape: shape.padded)
    item = _temporary(largest, types.original)
    return Sequence([alloc(item, 3), free(item, 3)], "optimizer step")


def _temporary(shape: Shape, dtype: str) -> Item:
    return Item(
        category="transient",
        what=f"optimizer temporary like {shape.name}",
        bytes=round_up(dtypes.size_bytes(shape.padded, dtype)),
        formula=f"one shard, {shape.padded} elements ({dtype})",
        lives="optimizer step",
        stream=COMPUTE_STREAM,
    )


def gradients(units: Units, counts: dict[str, int]) -> list[tuple[Unit, int]]:
    """Units with how often each stands in the chunk."""
    found = [(unit, counts.get(name, 1)) for name, unit in units.of.items()]
    return found if units.root is None else [*found, (units.root, 1)]
