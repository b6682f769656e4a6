"""What a rank sends for parameters and gradients: which collectives, over which ranks, in which micro-batches."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from ullage import dtypes
from ullage.engines.fsdp2.policy import reduces_each, units_of
from ullage.engines.fsdp2.shapes import shard_count
from ullage.hardware.curve import Kind
from ullage.job.bind import is_expert, local_numel
from ullage.job.job import Job, Layout
from ullage.memory.rank import Rank
from ullage.model.graph import Block, Graph
from ullage.timing.work import Exchange

FSDP = ("fsdp1", "fsdp2")
PARAMETERS_SHARDED = 3
GRADIENTS_SHARDED = 2


class Holds(Protocol):
    """Whoever knows how many elements of parameters, dense or expert, are on a rank: a Rank, or a search's sums."""

    def numel(self, *, expert: bool) -> int: ...


def is_sharded(job: Job) -> bool:
    """Whether parameters are gathered block by block."""
    stage = job.engine.zero_stage
    return stage > 0 if job.engine.name in FSDP else stage >= PARAMETERS_SHARDED


def resident(job: Job) -> bool:
    """Whether a stage gathers once a step and reduces after its last micro-batch: FSDP under torch's pipeline schedules
    (distributed/pipelining/stage.py, backward_maybe_with_nosync)."""
    return job.engine.name in FSDP and job.layout.pp > 1


def reductions(job: Job) -> int:
    """Micro-batches of a step whose gradients are reduced: all where gradients are sharded, the last where they add up in place.

    Sources: DeepSpeed runtime/zero/stage_1_and_2.py (backward: partition_gradients, or the boundary of the accumulation); accelerate's
    no_sync under FSDP; Megatron-FSDP's optim_grads.
    """
    sharded = reduces_each(job) if job.engine.name in FSDP else job.engine.zero_stage >= GRADIENTS_SHARDED
    return job.data.grad_accum if sharded else 1


@lru_cache(maxsize=1024)
def gathered_again(job: Job, graph: Graph, rank: Rank, chunk: int) -> frozenset[str]:
    """Blocks of a chunk whose parameters are dropped after the forward and gathered again for the backward, by name."""
    if not is_sharded(job) or resident(job):
        return frozenset()
    part = rank.chunks[chunk]
    if job.engine.name not in FSDP:
        return frozenset(run.block.name for run in part.runs)
    units = units_of(job, graph, rank, part)
    return frozenset(name for name, unit in units.of.items() if unit.reshards)


@lru_cache(maxsize=4096)
def gathers(job: Job, graph: Graph, block: Block) -> tuple[Exchange, ...]:
    """All-gathers of one block's parameters, in the compute type."""
    if not is_sharded(job):
        return ()
    compute = job.precision.compute if job.precision.compute not in ("fp8", "fp4") else "bf16"
    return tuple(
        _exchange("all_gather", "expert_shard" if expert else "shard", numel, compute)
        for expert, numel in _numels(job, graph, block)
        if shard_count(job, expert=expert) > 1
    )


@lru_cache(maxsize=4096)
def reduced(job: Job, graph: Graph, block: Block) -> tuple[Exchange, ...]:
    """Reduce-scatters of one block's gradients, and the all-reduce of what is left among the groups that hold the same shards."""
    if not is_sharded(job):
        return ()
    layout, found = job.layout, []
    for expert, numel in _numels(job, graph, block):
        shards = shard_count(job, expert=expert)
        name = "expert_" if expert else ""
        if shards > 1:
            found.append(_exchange("reduce_scatter", f"{name}shard", numel, job.precision.reduce))
        if shards < (layout.expert_dp if expert else layout.dp * layout.cp):
            found.append(_exchange("all_reduce", f"{name}replica", -(-numel // shards), job.precision.reduce))
    return tuple(found)


def replica_reductions(job: Job, rank: Holds) -> tuple[Exchange, ...]:
    """How whole gradients of a rank are reduced: scattered where the optimizer is sharded (DeepSpeed, Megatron), else summed."""
    scatters = job.engine.zero_stage > 0 and job.engine.name != "zero1"
    return tuple(
        _exchange("reduce_scatter" if scatters else "all_reduce", axis, numel, job.precision.reduce)
        for axis, numel in _replicas(job, rank)
    )


def replica_gathers(job: Job, rank: Holds) -> tuple[Exchange, ...]:
    """Parameters after a sharded optimizer's step: each rank has those that it stepped."""
    if not job.engine.zero_stage:
        return ()
    return tuple(_exchange("all_gather", axis, numel, job.precision.params) for axis, numel in _replicas(job, rank))


def _replicas(job: Job, rank: Holds) -> list[tuple[str, int]]:
    """(axis, elements) of dense and expert parameters that more than one rank holds."""
    if is_sharded(job):
        return []
    layout = job.layout
    found = (
        ("dp", layout.dp * layout.cp, rank.numel(expert=False)),
        ("expert_dp", layout.expert_dp, rank.numel(expert=True)),
    )
    return [(axis, numel) for axis, ranks, numel in found if ranks > 1 and numel]


def _numels(job: Job, graph: Graph, block: Block) -> tuple[tuple[bool, int], ...]:
    """(whether they are experts, elements) of a block's parameters on this rank before they are sharded."""
    layout = job.layout
    return _numels_under(graph, block, layout.tp, layout.ep, layout.etp)


@lru_cache(maxsize=4096)
def _numels_under(graph: Graph, block: Block, tp: int, ep: int, etp: int) -> tuple[tuple[bool, int], ...]:
    layout = Layout(tp=tp, ep=ep, etp=etp)
    sums = {False: 0, True: 0}
    for param in block.params:
        if not param.buffer:
            sums[is_expert(param)] += local_numel(graph, param, layout)
    return tuple((expert, numel) for expert, numel in sums.items() if numel)


def shard_numel(job: Job, graph: Graph, block: Block) -> float:
    """Elements of a block's parameters that a rank keeps."""
    return sum(numel / shard_count(job, expert=expert) for expert, numel in _numels(job, graph, block))


def _exchange(kind: Kind, axis: str, numel: int, dtype: str) -> Exchange:
    return Exchange(kind=kind, axis=axis, payload_bytes=dtypes.size_bytes(numel, dtype))
