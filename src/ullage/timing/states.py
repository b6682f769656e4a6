"""What a rank sends for parameters and gradients: which collectives, over which ranks, in which micro-batches."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from ullage import dtypes
from ullage.engines import quantised
from ullage.engines.fsdp2.policy import reduces_each, units_of
from ullage.engines.fsdp2.shapes import shard_count
from ullage.frozen import frozen
from ullage.hardware.curve import Kind
from ullage.job.adapted import PACKED, model_type
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
    """All-gathers of one block's parameters, frozen ones too."""
    if not is_sharded(job):
        return ()
    return tuple(
        Exchange(kind="all_gather", axis="expert_shard" if expert else "shard", payload_bytes=payload_bytes)
        for expert, numel in _numels(job, graph, block)
        if shard_count(job, expert=expert) > 1 and (payload_bytes := _gathered_bytes(job, numel))
    )


def gathered_bytes(job: Job, graph: Graph, block: Block) -> int:
    """Of one block's parameters, as they are gathered."""
    return sum(_gathered_bytes(job, numel) for _, numel in _numels(job, graph, block))


def _gathered_bytes(job: Job, numel: Numel) -> int:
    """In the compute type, packed ones as they are; what FSDP2 is not let shard of these, none (engines/quantised.py, shards)."""
    compute = job.precision.compute if job.precision.compute not in ("fp8", "fp4") else "bf16"
    packed = quantised.sharded_bytes(job, numel.packed) if numel.packed and quantised.shards(job) else 0
    return dtypes.size_bytes(numel.whole - numel.packed, compute) + packed


@lru_cache(maxsize=4096)
def reduced(job: Job, graph: Graph, block: Block) -> tuple[Exchange, ...]:
    """Reduce-scatters of one block's gradients, and the all-reduce of what is left among the groups that hold the same shards. What is
    frozen has none."""
    if not is_sharded(job):
        return ()
    layout, found = job.layout, []
    for expert, each in _numels(job, graph, block):
        numel = each.trained
        if not numel:
            continue
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


@frozen
class Numel:
    """Elements of a block's parameters on a rank before they are sharded. trained, packed: of these, with gradients, and in four bits."""

    whole: int
    trained: int
    packed: int


def _numels(job: Job, graph: Graph, block: Block) -> tuple[tuple[bool, Numel], ...]:
    """Of a block's parameters, experts (True) and others, where there are any."""
    layout = job.layout
    return _numels_under(graph, block, layout.tp, layout.ep, layout.etp)


@lru_cache(maxsize=4096)
def _numels_under(graph: Graph, block: Block, tp: int, ep: int, etp: int) -> tuple[tuple[bool, Numel], ...]:
    layout = Layout(tp=tp, ep=ep, etp=etp)
    found = []
    for expert in (False, True):
        params = [one for one in block.params if not one.buffer and is_expert(one) == expert]
        numels = [local_numel(graph, one, layout) for one in params]
        if sum(numels):
            trained = sum([numel for one, numel in zip(params, numels, strict=True) if one.trainable])
            packed = sum([numel for one, numel in zip(params, numels, strict=True) if one.elements in PACKED])
            found.append((expert, Numel(whole=sum(numels), trained=trained, packed=packed)))
    return tuple(found)


def shard_numels(job: Job, graph: Graph, block: Block) -> tuple[float, float]:
    """Of a block's parameters that a rank keeps: elements of the trained ones and bytes of the frozen ones."""
    each = [(numel, shard_count(job, expert=expert)) for expert, numel in _numels(job, graph, block)]
    trained = sum(numel.trained / shards for numel, shards in each)
    return trained, sum(_frozen_bytes(job, numel) / shards for numel, shards in each)


def _frozen_bytes(job: Job, numel: Numel) -> float:
    packed = quantised.sharded_bytes(job, numel.packed) if numel.packed and quantised.shards(job) else 0
    return (numel.whole - numel.trained - numel.packed) * dtypes.bits(model_type(job)) / 8 + packed


def _exchange(kind: Kind, axis: str, numel: int, dtype: str) -> Exchange:
    return Exchange(kind=kind, axis=axis, payload_bytes=dtypes.size_bytes(numel, dtype))
