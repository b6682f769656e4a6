"""Reserved memory of a rank: its run so far, as the allocator's simulation sees it.

A long pipeline repeats itself: where the whole history has too many events, a shorter one with the same layers and as many
micro-batches as are ever in flight stands for it, and what it wastes is added to the whole one's peak. Where lengths vary, steps of
other lengths follow.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.engines import lengths
from ullage.engines.base import Account, flag
from ullage.engines.registry import account
from ullage.frozen import FrozenMap
from ullage.job.job import Job
from ullage.memory.overhead import outside_allocator
from ullage.memory.rank import Rank
from ullage.memory.reserved import simulate
from ullage.model.graph import Graph

MOST_EVENTS = 30_000
_EXPANDABLE = "expandable_segments"


def without_allocator(job: Job) -> Job:
    """What a job's tensors and seconds depend on: neither what is the allocator's alone nor which keys it left open. They are then known
    already where another job differs in nothing else."""
    options = job.engine.options
    if _EXPANDABLE in options:
        others = FrozenMap({name: value for name, value in options.items() if name != _EXPANDABLE})
        job = replace(job, engine=replace(job.engine, options=others))
    return replace(job, defaults=()) if job.defaults else job


def reserved_bytes(job: Job, graph: Graph, rank: Rank, found: Account, peak_bytes: int) -> int:
    """What the caching allocator has taken from the driver at most; never less than ``peak_bytes``."""
    expandable = flag(job.engine.options, _EXPANDABLE, False)
    return _reserved_bytes(without_allocator(job), graph, rank, found, peak_bytes, expandable=expandable)


def _reserved_bytes(job: Job, graph: Graph, rank: Rank, found: Account, peak_bytes: int, *, expandable: bool) -> int:
    varies = job.data.seq_len_mean is not None and not expandable  # segments that expand serve every length
    if varies or found.history.changes > MOST_EVENTS:
        job = _shorter(job)
        found = account(job, graph, rank)
    history = found.history_with(lengths.steps(job, graph, rank)) if varies else found.history
    outside = outside_allocator(job.cluster, found.groups, eager=found.eager)
    capacity = job.cluster.device.capacity_bytes - sum(one.bytes for one in outside)
    simulated = simulate(history, expandable_segments=expandable, capacity_bytes=capacity)
    waste = max(0, simulated.reserved_bytes - simulated.allocated_bytes)
    if found.before is None:
        return peak_bytes + waste
    first = account(found.before, graph, rank)
    in_first = _reserved_bytes(found.before, graph, rank, first, first.program.peak_bytes, expandable=expandable)
    return max(peak_bytes, found.program.peak_bytes + waste, in_first)


def _shorter(job: Job) -> Job:
    """The same job with as few micro-batches as fill its pipeline."""
    pipeline = job.layout.pp
    enough = pipeline + 1 if job.layout.schedule in ("gpipe", "1f1b") else 2 * pipeline
    return replace(job, data=replace(job.data, grad_accum=min(job.data.grad_accum, max(2, enough))))
