"""What FSDP2 keeps the whole run: shards, the optimizer's moments, and the small things beside them."""

from __future__ import annotations

from ullage import dtypes
from ullage.engines import optimizer, quantised
from ullage.engines.base import cublas_workspaces, images, optimizer_of, pinned, registered, sized
from ullage.engines.fsdp2.policy import Units, types_of
from ullage.engines.fsdp2.units import Shape, Unit
from ullage.engines.optimizer import Group, Stepped
from ullage.hardware import overheads
from ullage.job.adapted import PACKED, graph_of
from ullage.job.engine import OF_TRANSFORMERS
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory.program import EMPTY, Item, Node, Sequence, round_up
from ullage.memory.rank import Rank

Counted = tuple[Item, int]


def shapes_on(rank: Rank, units: list[Units]) -> list[tuple[Shape, int]]:
    """Every parameter of the rank with how many blocks hold one like it."""
    counts: dict[str, int] = {param.name: param.copies for param in rank.params}
    blocks: dict[str, int] = {param.block.name: param.copies for param in rank.params}
    seen: dict[str, Shape] = {}
    for one in units:
        for unit in ([one.root] if one.root is not None else []) + list(one.of.values()):
            for shape in (*unit.shapes, *(shape for one in unit.apart for shape in one.shapes)):
                seen.setdefault(shape.name, shape)
    return [(shape, counts.get(name) or blocks.get(name.split(".")[0], 1)) for name, shape in seen.items()]


def packed(job: Job, rank: Rank) -> list[Counted]:
    """What of a packed base is whole on every rank: scales and levels, and the weights too where they are not sharded."""
    found = [param for param in rank.params if param.param.elements in PACKED]
    if not found:
        return []
    graph = graph_of(job)
    items = quantised.beside(job, found, graph) if quantised.shards(job) else quantised.held(found, graph)
    return [(item, 1) for item in items]


def states(job: Job, rank: Rank, units: list[Units]) -> list[Counted]:
    """Each parameter's padded shard, an allocation of its own, and the optimizer's states of it."""
    if job.offload.params != "none":
        return []
    types = types_of(job)
    found: list[Counted] = [
        (_shard(shape, shape.original or types.original), copies) for shape, copies in shapes_on(rank, units)
    ]
    if job.offload.optimizer == "none":
        momentum = bool(job.engine.options.get("momentum"))  # torch's default is 0
        found += optimizer.states(optimizer_of(job), stepped(job, rank, units), momentum=momentum)
    return found


def host_bytes(job: Job, rank: Rank, units: list[Units]) -> int:
    """Under CPUOffloadPolicy: each shard and its gradient, pinned blocks of their own, and the optimizer's states, which are not.

    Source: _fsdp_param.py (``_init_sharded_param``: pin_memory), _fsdp_collectives.py (``foreach_reduce``: a copy that does not block is
    to pinned memory); a shard's state is like the shard, and torch pins nothing that it makes so.
    """
    if job.offload.params == "none":
        return 0
    gradients = pinned_shards(job, rank, units, trainable=True)
    moments = optimizer.states(
        optimizer_of(job), stepped(job, rank, units), momentum=bool(job.engine.options.get("momentum"))
    )
    return pinned_shards(job, rank, units) + gradients + sum(item.bytes * count for item, count in moments)


def pinned_shards(job: Job, rank: Rank, units: list[Units], *, trainable: bool = False) -> int:
    """Of the shards that are on the host, each a block. trainable: of those that have gradients alone."""
    if job.offload.params == "none":
        return 0
    dtype = types_of(job).original
    return sum(
        copies * pinned(dtypes.size_bytes(shape.padded, shape.original or dtype))
        for shape, copies in shapes_on(rank, units)
        if shape.trainable or not trainable
    )


def stepped(job: Job, rank: Rank, units: list[Units]) -> tuple[Group, ...]:
    """What the optimizer steps: every trainable parameter's shard."""
    dtype = types_of(job).original
    return tuple(
        Group(
            tensors=(
                Stepped(name=shape.name, shape=_stepped(shape), dtype=shape.original or dtype, state=shape.original),
            ),
            repeat=copies,
        )
        for shape, copies in shapes_on(rank, units)
        if shape.trainable
    )


def _stepped(shape: Shape) -> tuple[int, int]:
    return (shape.padded // shape.columns, shape.columns) if shape.stepped is None else (shape.stepped, 1)


def _shard(shape: Shape, dtype: str) -> Item:
    return Item(
        category="parameters",
        what=f"shard of {shape.name}",
        bytes=round_up(dtypes.size_bytes(shape.padded, dtype)),
        formula=f"ceil({shape.rows} rows / {shape.shards}) x {shape.columns} x {dtypes.bits(dtype) / 8:g} B ({dtype})",
        lives="the whole run",
    )


def beside(job: Job, context: Context, head_dim: int) -> list[Counted]:
    """Batch, rotary table, cuBLAS workspaces."""
    tokens = job.data.seq_len * job.data.micro_batch
    inputs = images(context) or sized(
        "input", "token ids and labels", 2 * tokens, "int64", why="the whole sequence before context parallelism"
    )
    cublas = cublas_workspaces(overheads.cublas_workspace_bytes(job.cluster.device))
    tables = registered(context) if job.stack in OF_TRANSFORMERS else [_complex_rotary_table(job, head_dim)]
    return [(inputs, 1), *((one, 1) for one in (*tables, *cublas))]


def _complex_rotary_table(job: Job, head_dim: int) -> Item:
    numel = job.data.seq_len * head_dim
    return sized("buffers", "rotary table", numel, "fp32", shards=job.layout.cp, why="complex64, half the head")


def optimizer_step(job: Job, rank: Rank, units: list[Units]) -> Node:
    """Clipping and the optimizer's temporaries; with parameters on the host both happen there."""
    if job.offload.params != "none":
        return EMPTY
    groups = stepped(job, rank, units)
    clipping = [optimizer.clip(optimizer.count(groups))] if job.grad_clip else []
    return Sequence([*clipping, optimizer.step(optimizer_of(job), groups)])


def gradients(units: Units, counts: dict[str, int]) -> list[tuple[Unit, int]]:
    """Units that have gradients, with how often each stands in the chunk."""
    found = [(unit, counts.get(name, 1)) for name, unit in units.of.items()]
    found += [] if units.root is None else [(units.root, 1)]
    inside = [(one, count) for unit, count in found for one in unit.apart]
    return [(unit, count) for unit, count in (*found, *inside) if unit.reduced]
