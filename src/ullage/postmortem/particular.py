"""Causes of jobs whose steps are not all alike: sequences of many lengths, and experts that the router fills."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ullage.engines.estimate import rank_peak
from ullage.engines.registry import ranks_of
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.memory.program import Peak
from ullage.postmortem.causes import Reason
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.outside_step import ROOMY
from ullage.units import format_bytes

_ROUTED = "routed "
"""How a kernel's formula names tokens that the router has sent here."""
_CAPACITY = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")
_LIKELY_TIMES = 2.0
"""As many tokens as balanced routing sends to a rank: seen early in training, and of a router without a balancing loss."""


def lengths(job: Job, longest_bytes: int, capacity: int) -> Iterator[Reason]:
    """A step of mean lengths fits, and one of the longest does not."""
    mean = job.data.seq_len_mean
    if mean is None or longest_bytes <= ROOMY * capacity:
        return
    usual = replace(job, data=replace(job.data, seq_len=max(1, int(mean)), seq_len_mean=None))
    graph = graph_of(usual)
    bytes_ = max(rank_peak(usual, graph, rank)[0] for rank in ranks_of(usual, graph))
    if bytes_ <= ROOMY * capacity:
        yield Reason(
            kind="outlier-length",
            weight=3.2,
            why=f"{mean:,.0f} tokens, the mean, take {format_bytes(bytes_)} of {format_bytes(capacity)}, and {job.data.seq_len:,}, the "
            f"longest, {format_bytes(longest_bytes)}",
        )


def experts(job: Job, peak: Peak, evidence: Evidence, capacity: int) -> Iterator[Reason]:
    """More tokens for this rank's experts than its share. Without expert parallelism every rank has its own tokens, however routed."""
    if job.layout.ep == 1 or any(job.engine.options.get(name) for name in _CAPACITY):
        return
    routed = sum(item.bytes * count for item, count in peak.live.items() if _ROUTED in item.formula)
    if not routed or peak.bytes > capacity:
        return
    times = 1 + (capacity - peak.bytes) / routed
    inside = "experts" in evidence.phases
    if times > job.layout.ep or not (inside or times <= _LIKELY_TIMES):
        return
    yield Reason(
        kind="expert-imbalance",
        weight=2.2 if inside else 1.2,
        why=f"{format_bytes(routed)} of {format_bytes(peak.bytes)} predicted at the peak are of tokens that the router sends to experts "
        f"here, taken balanced; with {times:.1f} x as many the card is full",
    )
