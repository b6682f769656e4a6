"""A memory snapshot in the terminal: what it holds, and beside it what the account says."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ullage.postmortem.snapshot import Summary
from ullage.postmortem.snapshot_compare import Comparison
from ullage.postmortem.snapshot_frames import UNKNOWN
from ullage.report import words
from ullage.report.console import heading
from ullage.report.words import error, in_gib, share

MOST_HOLDERS = 12


def snapshot_report(summary: Summary) -> Iterator[RenderableType]:
    """A snapshot by itself."""
    yield from _head(summary)
    yield heading("Held, by category", "told from the call stacks")
    table = _table(3)
    for category, size in sorted(summary.by_category.items(), key=lambda pair: -pair[1]):
        table.add_row(category, in_gib(size), share(size, summary.allocated_bytes))
    yield Padding(table, (0, 0, 0, 2), expand=False)
    yield from _blocks(summary)


def comparison_report(comparison: Comparison) -> Iterator[RenderableType]:
    """A snapshot beside the account of a stage."""
    summary, estimate = comparison.summary, comparison.estimate
    yield from _head(summary)
    stages = len(estimate.ranks)
    stage = f", stage {comparison.stage} of {stages}" if stages > 1 else ""
    yield heading("Beside the account", f"{estimate.job.model.name} on {words.cluster(estimate.job)}{stage}")
    table = _table(6)
    now, most = "in the snapshot", "at its history's highest"
    table.add_row("", "between steps", now, "at the peak", most, "error", style="dim")
    recorded = summary.at_peak is not None
    for line in comparison.lines:
        table.add_row(
            line.category,
            in_gib(line.between_bytes),
            _told(line.held_bytes, line.held_by_size_bytes),
            in_gib(line.peak_bytes),
            _told(line.most_bytes, line.most_by_size_bytes) if line.most_bytes is not None else "",
            _error(line.peak_bytes, line.most_bytes) if line.category != UNKNOWN else "",
        )
    table.add_section()
    table.add_row(
        "allocated",
        in_gib(sum(line.between_bytes for line in comparison.lines)),
        in_gib(sum(line.held_bytes for line in comparison.lines)),
        in_gib(sum(line.peak_bytes for line in comparison.lines)),
        in_gib(sum(line.most_bytes or 0 for line in comparison.lines)) if recorded else "",
        _error(sum(line.peak_bytes for line in comparison.lines), summary.peak_bytes),
        style="bold",
    )
    yield Padding(table, (0, 0, 0, 2), expand=False)
    notes = ["predicted: between steps, at the peak; held: the other two"]
    if not recorded:
        notes.append("no history in the snapshot: torch.cuda.memory._record_memory_history() records one")
    if any(line.held_by_size_bytes or line.most_by_size_bytes for line in comparison.lines):
        notes.append("* in part told by its size alone, since no call stack says what it is")
    yield Padding(Text("\n".join(notes), style="dim"), (0, 0, 0, 2), expand=False)
    yield from _blocks(summary)


def _told(size: int, by_size: int) -> str:
    return f"{in_gib(size)}{' *' if by_size else ''}"


def _error(predicted: int, held: int | None) -> str:
    return error(predicted / held - 1) if held else ""


def _head(summary: Summary) -> Iterator[RenderableType]:
    yield Text(f"Device {summary.device}", style="bold")
    table = _table(3)
    table.add_row("allocated", in_gib(summary.allocated_bytes), words.plural(len(summary.held), "block"))
    cached = summary.reserved_bytes - summary.allocated_bytes
    free = f"{in_gib(cached)} of it free, {in_gib(summary.split_bytes)} of that in segments partly used"
    table.add_row("reserved", in_gib(summary.reserved_bytes), free)
    if summary.peak_bytes is not None:
        table.add_row("highest", in_gib(summary.peak_bytes), "allocated, in the recorded history")
    yield Padding(table, (0, 0, 0, 2), expand=False)
    yield heading("Pools")
    pools = _table(6)
    pools.add_row("", "segments", "reserved", "allocated", "free", "largest free block", style="dim")
    for pool in summary.pools:
        sizes = (pool.reserved_bytes, pool.allocated_bytes, pool.free_bytes, pool.largest_free_bytes)
        pools.add_row(pool.name, f"{pool.segments:,}", *map(in_gib, sizes))
    yield Padding(pools, (0, 0, 0, 2), expand=False)


def _blocks(summary: Summary) -> Iterator[RenderableType]:
    """The largest holders, blocks of one name together."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for one in summary.held:
        sizes.setdefault((one.category, one.what), []).append(one.bytes)
    largest = sorted(sizes.items(), key=lambda pair: -sum(pair[1]))
    yield heading("Largest holders", f"{min(MOST_HOLDERS, len(largest))} of {len(largest):,}")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for number in range(4):
        table.add_column(justify="left" if number > 1 else "right", no_wrap=number < 3)
    for (category, what), found in largest[:MOST_HOLDERS]:
        table.add_row(
            Text(in_gib(sum(found))), Text(words.plural(len(found), "block")), Text(category), Text(what, style="dim")
        )
    yield Padding(table, (0, 0, 0, 2), expand=False)


def _table(columns: int) -> Table:
    """A name and numbers."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for number in range(columns):
        table.add_column(justify="right" if number else "left", no_wrap=True)
    return table
