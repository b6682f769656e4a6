"""The estimate: every rank's account, its worst moment, and the verdict against the device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from ullage.engines.base import Account, context_of
from ullage.engines.interval import Interval, interval, is_filled
from ullage.engines.registry import account, ranks_of
from ullage.engines.reserved import reserved_bytes, without_allocator
from ullage.frozen import frozen, replace
from ullage.hardware.overheads import Overhead
from ullage.job.adapted import graph_of, left_out
from ullage.job.adapted_experts import untrained
from ullage.job.job import Job
from ullage.kernels.stacks import unmet
from ullage.memory.ledger import Line, ledger
from ullage.memory.overhead import outside_allocator
from ullage.memory.program import Peak, locate_peak
from ullage.memory.rank import Rank
from ullage.model.count import flops_per_token
from ullage.model.graph import Graph

Verdict = Literal["fits", "tight", "oom"]


@frozen
class PeakEstimate:
    """The worst moment of the worst rank. low_bytes..high_bytes bracket device_bytes."""

    rank: int
    moment: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int
    high_bytes: int


@frozen
class RankEstimate:
    """One pipeline stage: its global ranks hold the same. static_bytes: allocated between two steps."""

    ranks: range
    stage: int
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    static_bytes: int
    moment: str


@frozen
class Estimate:
    """What ``ullage estimate`` answers; docs/job.md names its JSON form. All sizes are bytes.

    verdict: of the card, and of a node's own memory, as far as it is known how much there is. ledger: the account at the peak of the worst
    rank; its bytes add up to peak.allocated_bytes exactly. host_bytes: of a node.
    """

    job: Job
    verdict: Verdict
    capacity_bytes: int
    peak: PeakEstimate
    ranks: tuple[RankEstimate, ...]
    ledger: tuple[Line, ...]
    host_bytes: int
    parameters: int
    trainable_parameters: int
    flops_per_step: int
    outside: tuple[tuple[str, int, str], ...]
    warnings: tuple[str, ...]

    @property
    def defaults(self) -> tuple[str, ...]:
        return self.job.defaults

    @property
    def is_over_host(self) -> bool:
        """Whether the verdict is the host's, whatever the card's."""
        return over_host(self.job, self.host_bytes)

    @property
    def cache_fills(self) -> bool:
        """Whether the high end is what the allocator's cache may take of the card and gives back, and not what is needed."""
        return is_filled(self.peak.high_bytes, self.capacity_bytes)


def estimate(job: Job, graph: Graph | None = None) -> Estimate:
    """Every rank's memory, the worst one's ledger, and the verdict.

    graph: what is trained in place of the job's model; of a traced one (trace/graph.py) job.stack is "traced".

    Raises Unsupported where the job needs something that is not modelled, Infeasible where its layout cannot exist.
    """
    held = without_allocator(job)
    graph = graph or graph_of(held)
    peaks = [_peak_of(held, graph, rank) for rank in ranks_of(held, graph)]
    found = _with_reserved(job, graph, peaks)
    worst = max(found, key=lambda one: one.device_bytes)
    device = job.cluster.device
    bracket = interval(job, worst.account, worst.reserved_bytes, worst.overheads)
    trainable = graph.parameter_count(trainable=True)
    layers = [run.block for run in graph.runs if run.block.role == "layer"]
    again = unmet(job.recompute, layers, context_of(held, graph))
    host_bytes = host_bytes_of(job, [one.account for one in found])
    return Estimate(
        job=job,
        verdict="oom" if over_host(job, host_bytes) else verdict_of(bracket, device.capacity_bytes),
        capacity_bytes=device.capacity_bytes,
        peak=PeakEstimate(
            rank=worst.ranks.start,
            moment=worst.moment,
            allocated_bytes=worst.peak.bytes,
            reserved_bytes=worst.reserved_bytes,
            device_bytes=worst.device_bytes,
            low_bytes=bracket.low_bytes,
            high_bytes=bracket.high_bytes,
        ),
        ranks=tuple(one.summary() for one in found),
        ledger=ledger(worst.peak),
        host_bytes=host_bytes,
        parameters=graph.parameter_count(),
        trainable_parameters=trainable,
        flops_per_step=_flops_per_step(job, graph),
        outside=tuple((one.what, one.bytes, one.provenance) for one in worst.overheads),
        warnings=(*job.warnings, *left_out(job), *untrained(graph), *again, *worst.account.warnings),
    )


def host_bytes_of(job: Job, accounts: Iterable[Account]) -> int:
    """Of the node that needs most, all of whose ranks are taken as the one that does; device_map is one process."""
    each = [one.host_bytes for one in accounts]
    return sum(each) if job.engine.name == "single" else max(each) * min(job.cluster.gpus_per_node, job.layout.world)


def over_host(job: Job, host_bytes: int) -> bool:
    """Whether a node has not the memory, as far as it is known how much there is."""
    memory = job.cluster.host_memory_bytes
    return memory is not None and host_bytes > memory


def verdict_of(bracket: Interval, capacity_bytes: int) -> Verdict:
    """What an interval of a device's bytes says of its capacity."""
    if bracket.high_bytes < capacity_bytes:
        return "fits"
    return "oom" if bracket.low_bytes > capacity_bytes else "tight"


def _flops_per_step(job: Job, graph: Graph) -> int:
    sequences = job.data.micro_batch * job.data.grad_accum * job.layout.dp
    return int(flops_per_token(graph, job.data.seq_len) * job.data.seq_len * sequences)


@frozen
class _Found:
    rank: Rank
    ranks: range
    account: Account
    peak: Peak
    overheads: tuple[Overhead, ...]
    reserved_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return self.reserved_bytes + sum(one.bytes for one in self.overheads)

    @property
    def moment(self) -> str:
        return moment(self.peak)

    def with_reserved(self, reserved_bytes: int) -> _Found:
        return replace(self, reserved_bytes=reserved_bytes)

    def summary(self) -> RankEstimate:
        return RankEstimate(
            ranks=self.ranks,
            stage=self.rank.index,
            allocated_bytes=self.peak.bytes,
            reserved_bytes=self.reserved_bytes,
            device_bytes=self.device_bytes,
            static_bytes=self.account.static_bytes,
            moment=self.moment,
        )


@lru_cache(maxsize=512)
def _peak_of(job: Job, graph: Graph, rank: Rank) -> _Found:
    """Of a rank's account, or of that of its first steps where they need more."""
    found = account(job, graph, rank)
    each = job.layout.world // job.layout.pp
    own = _Found(
        rank=rank,
        ranks=range(rank.index * each, (rank.index + 1) * each),
        account=found,
        peak=locate_peak(found.program),
        overheads=outside_allocator(job.cluster, found.groups, eager=found.eager),
    )
    if found.before is None:
        return own
    return max(own, _peak_of(found.before, graph, rank), key=lambda one: one.peak.bytes)


def located(job: Job, graph: Graph, rank: Rank) -> tuple[Peak, Account]:
    """One rank's peak and its account: what is known before the allocator is simulated."""
    found = _peak_of(without_allocator(job), graph, rank)
    return found.peak, found.account


def rank_peak(job: Job, graph: Graph, rank: Rank) -> tuple[int, Account]:
    """Allocated bytes of one rank's peak, and its account."""
    peak, found = located(job, graph, rank)
    return peak.bytes, found


@lru_cache(maxsize=512)
def _waste(job: Job, graph: Graph, worst: Rank, peak_bytes: int) -> int:
    """Reserved minus allocated on the worst rank, simulated; the other ranks waste the same share."""
    return reserved_bytes(job, graph, worst, account(without_allocator(job), graph, worst), peak_bytes) - peak_bytes


_NEAR = 0.8
"""A pipeline's first and last rank are simulated too where they allocate at least this share of the worst one."""


def _with_reserved(job: Job, graph: Graph, peaks: list[_Found]) -> list[_Found]:
    """Reserved memory of every rank. The worst is simulated, and the first and last of a pipeline where they come near it: the
    first holds the most micro-batches in flight, and wastes most. The others waste the same share as the worst."""
    worst = max(peaks, key=lambda one: one.peak.bytes)
    simulated = {id(worst): _waste(job, graph, worst.rank, worst.peak.bytes)}
    for one in (peaks[0], peaks[-1]):
        if id(one) not in simulated and one.peak.bytes >= _NEAR * worst.peak.bytes:
            simulated[id(one)] = _waste(job, graph, one.rank, one.peak.bytes)
    share = simulated[id(worst)]
    return [
        one.with_reserved(one.peak.bytes + simulated.get(id(one), share * one.peak.bytes // worst.peak.bytes))
        for one in peaks
    ]


def moment(peak: Peak) -> str:
    """The peak's moment in words: "backward of head, micro-batch 1"."""
    named = [name for name in peak.moments if name not in ("forward", "backward")] or list(peak.moments)
    words = named[0] if named else "load"
    if len(named) > 1 and named[-1] != named[0]:
        words = f"{words}: {named[-1]}"
    return f"{words}, micro-batch {peak.micro_batch}" if peak.micro_batch else words
