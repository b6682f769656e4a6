"""One change of a job, and what is known of it: its bytes, its seconds, its verdict."""

from __future__ import annotations

from functools import cached_property

from ullage.engines.changes import Change
from ullage.engines.estimate import Estimate, estimate, rank_peak
from ullage.engines.interval import interval
from ullage.engines.registry import ranks_of
from ullage.engines.reserved import without_allocator
from ullage.errors import UllageError
from ullage.frozen import frozen
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.memory.overhead import outside_allocator
from ullage.memory.rank import Rank
from ullage.model.graph import Graph
from ullage.postmortem.outside_step import ROOMY
from ullage.timing.step import step_time


@frozen
class Least:
    """peak_bytes: allocated on the rank that holds most. outside_bytes: what it holds outside the allocator. high_bytes: the high estimate
    of its device, were nothing of the allocator's wasted. host_bytes: of a node."""

    peak_bytes: int
    outside_bytes: int
    high_bytes: int
    host_bytes: int


class Option:
    """A change and the job that it makes; no change at all is the job as it ran. What is known of it is found out when it is asked for."""

    def __init__(self, change: Change, job: Job, beyond_bytes: int = 0) -> None:
        self.change = change
        self.job = job
        self.beyond_bytes = beyond_bytes

    @cached_property
    def seconds(self) -> float | None:
        return seconds(self.job)

    @cached_property
    def least(self) -> Least | None:
        """None where no account models it."""
        try:
            return least(self.job)
        except UllageError:
            return None

    @property
    def peak_bytes(self) -> int:
        assert self.least is not None, "what is not modelled is no option"
        return self.least.peak_bytes

    @property
    def host_bytes(self) -> int:
        return self.least.host_bytes if self.least is not None else 0

    @property
    def may_fit(self) -> bool:
        return (
            self.least is not None
            and self.least.high_bytes + self.beyond_bytes < self.job.cluster.device.capacity_bytes
            and self.on_host <= 1
        )

    @property
    def on_host(self) -> float:
        """The share of a node's memory that is asked of it, 0 where it is not known."""
        memory = self.job.cluster.host_memory_bytes
        return self.host_bytes / memory if memory else 0.0

    @cached_property
    def estimate(self) -> Estimate:
        """With what is reserved: the allocator is played, which takes longer than all else."""
        return estimate(self.job)

    @property
    def after(self) -> Estimate | None:
        """None where the tensors alone pass the card, or the states the host, so that the allocator need not be played."""
        over = self.peak_bytes + self.beyond_bytes > self.job.cluster.device.capacity_bytes
        return None if over or self.on_host > 1 else self.estimate

    @property
    def bracket(self) -> tuple[int, int] | None:
        """The low and the high estimate, with what the run needed beyond its account."""
        if self.after is None:
            return None
        return self.after.peak.low_bytes + self.beyond_bytes, self.after.peak.high_bytes + self.beyond_bytes

    @property
    def verdict(self) -> str:
        capacity = self.job.cluster.device.capacity_bytes
        if self.bracket is None or self.bracket[0] > capacity:
            return "oom"
        return "fits" if self.bracket[1] < capacity and self.on_host <= ROOMY else "tight"


_FEWER_IN_FLIGHT = ("gpipe", "1f1b")
"""Schedules under which no rank holds more micro-batches than one before it."""


def heaviest(job: Job, graph: Graph) -> tuple[Rank, ...]:
    """The pipeline ranks of which one holds most: of those that run the same blocks the first, where no later one holds more."""
    ranks = ranks_of(job, graph)
    if job.layout.schedule not in _FEWER_IN_FLIGHT:
        return ranks
    return tuple({rank.chunks: rank for rank in reversed(ranks)}.values())


def least(job: Job) -> Least:
    held = without_allocator(job)
    graph = graph_of(held)
    peak, account = max((rank_peak(held, graph, rank) for rank in heaviest(held, graph)), key=lambda one: one[0])
    outside = outside_allocator(job.cluster, account.groups, eager=account.eager)
    return Least(
        peak_bytes=peak,
        outside_bytes=sum(one.bytes for one in outside),
        high_bytes=interval(job, account, peak, outside).high_bytes,
        host_bytes=account.host_bytes * job.cluster.gpus_per_node,
    )


def seconds(job: Job) -> float | None:
    try:
        return step_time(without_allocator(job)).step_s
    except UllageError:
        return None
