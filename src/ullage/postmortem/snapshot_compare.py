"""A snapshot beside an estimate, category by category.

A block's category comes from its call stack. Where that says nothing, its size may: a block is taken for an allocation of the
account that has the same size, as often as the account has it. Two categories with equal sizes cannot be told apart so;
what was matched by size is therefore a column of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ullage.engines.base import Account
from ullage.engines.estimate import Estimate
from ullage.engines.registry import account, ranks_of
from ullage.frozen import frozen
from ullage.job.adapted import graph_of
from ullage.memory.ledger import CATEGORIES
from ullage.memory.program import Item, Peak, locate_peak, round_up
from ullage.postmortem.snapshot import Summary, summarise
from ullage.postmortem.snapshot_frames import UNKNOWN
from ullage.postmortem.snapshot_history import Held


@frozen
class CompareLine:
    """One category. between_bytes and peak_bytes: of the account, between two steps and at its peak. held_bytes: in the snapshot;
    most_bytes: when its history was highest (None: not recorded). The by_size fields: the part of each that its size alone tells."""

    category: str
    between_bytes: int
    peak_bytes: int
    held_bytes: int
    held_by_size_bytes: int
    most_bytes: int | None
    most_by_size_bytes: int


@frozen
class Comparison:
    """A line for every category that either side has. stage: the pipeline stage of the account."""

    lines: tuple[CompareLine, ...]
    summary: Summary
    estimate: Estimate
    stage: int


def compare(
    snapshot: dict[str, object], estimate: Estimate, *, device: int | None = None, stage: int | None = None
) -> Comparison:
    """Holds a device of a snapshot against the estimate of a pipeline stage (None: the one of the peak)."""
    summary = summarise(snapshot, device=device)
    if stage is None:
        stage = next(one.stage for one in estimate.ranks if estimate.peak.rank in one.ranks)
    found = _account(estimate, stage)
    peak = locate_peak(found.program)
    between = _totals(found.static)
    highest = _totals(peak.live.items())
    held, held_by_size = _sorted_out(summary.held, peak)
    most, most_by_size = _sorted_out(summary.at_peak or (), peak)
    lines = tuple(
        CompareLine(
            category=name,
            between_bytes=between[name],
            peak_bytes=highest[name],
            held_bytes=held[name],
            held_by_size_bytes=held_by_size[name],
            most_bytes=None if summary.at_peak is None else most[name],
            most_by_size_bytes=most_by_size[name],
        )
        for name in (*CATEGORIES, UNKNOWN)
        if between[name] or highest[name] or held[name] or most[name]
    )
    return Comparison(lines=lines, summary=summary, estimate=estimate, stage=stage)


def _totals(items: Iterable[tuple[Item, int]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for item, count in items:
        totals[item.category] += item.bytes * count
    return totals


def _sorted_out(blocks: Sequence[Held], peak: Peak) -> tuple[Counter[str], Counter[str]]:
    """Bytes by category, and those of them that a size alone puts there."""
    totals: Counter[str] = Counter()
    by_size: Counter[str] = Counter()
    unmatched = _sizes(peak)
    for one in blocks:
        if one.category != UNKNOWN:
            totals[one.category] += one.bytes
            _use(unmatched, one, one.category)
    for one in blocks:
        if one.category == UNKNOWN:
            category = next((name for name in CATEGORIES if _use(unmatched, one, name)), UNKNOWN)
            totals[category] += one.bytes
            by_size[category] += one.bytes if category != UNKNOWN else 0
    return totals, by_size


def _account(estimate: Estimate, stage: int) -> Account:
    job = estimate.job
    graph = graph_of(job)
    return account(job, graph, ranks_of(job, graph)[stage])


def _sizes(peak: Peak) -> Counter[tuple[str, int]]:
    """How many allocations of each category and size are live at the peak, tensor by tensor."""
    found: Counter[tuple[str, int]] = Counter()
    for item, count in peak.live.items():
        for size in _tensors(item):
            found[item.category, size] += count
    return found


def _tensors(item: Item) -> tuple[int, ...]:
    return item.pieces or ((item.bytes,) if item.bytes else ())


def _use(unmatched: Counter[tuple[str, int]], one: Held, category: str) -> bool:
    """Takes an allocation of the account for this block, if one of the category and size is left."""
    key = category, round_up(one.requested_bytes)
    if not unmatched[key]:
        return False
    unmatched[key] -= 1
    return True
