"""A trace at a glance, and as JSON: its peak, the account there, what each module saved, the phases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ullage.memory.ledger import by_category
from ullage.report.console import PLAIN_WIDTH, heading
from ullage.report.json import ledger_line
from ullage.report.words import plural, share
from ullage.units import MIB

if TYPE_CHECKING:
    from ullage.trace.events import Trace

SCHEMA = 1
MOST_MODULES = 20
LEAST_SHARE = 0.002
MOST_LINES = 8


def trace_report(trace: Trace, *, width: int = PLAIN_WIDTH) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    peak = trace.steady
    world = f", rank {trace.rank} of {trace.world}" if trace.world > 1 else ""
    yield Text(f"{trace.name}{world}", style="bold")
    yield _indented(
        Text(f"{plural(len(trace.allocations), 'allocation')} in {plural(trace.steps, 'step')}", style="dim")
    )
    yield heading("Peak", f"{peak.phase}, at {peak.op} in {peak.module or 'the root'}")
    yield _indented(Text(f"{_mib(peak.bytes)}  {peak.bytes:,} bytes"))
    yield heading("Account at the peak", "to the byte; --json has every line")
    yield _indented(_account(trace))
    yield heading("Saved for backward", "alive when the last step's backward began, by the module that made it")
    yield _indented(_saved(trace))
    yield heading("Phases", "of each step: live at its beginning, the highest point, live at its end")
    yield _indented(_phases(trace))
    for note in trace.notes:
        yield _indented(Text(note, style="dim"))


def _account(trace: Trace) -> Table:
    peak = trace.steady
    lines = trace.ledger(peak.at)
    table = _table("left", "right", "right")
    for category, total in sorted(by_category(lines).items(), key=lambda pair: -pair[1]):
        table.add_row(Text(category, style="bold"), Text(_mib(total), style="bold"), Text(share(total, peak.bytes)))
        mine = [line for line in lines if line.category == category]
        large = [line for line in mine if line.bytes >= LEAST_SHARE * peak.bytes][:MOST_LINES]
        for line in large:
            name = f"{line.count} x {line.what}" if line.count > 1 else line.what
            table.add_row(Text(f"  {name}"), Text(_mib(line.bytes)), Text(share(line.bytes, peak.bytes)))
        rest = sum(line.bytes for line in mine) - sum(line.bytes for line in large)
        if rest:
            others = plural(len(mine) - len(large), "other line")
            table.add_row(
                Text(f"  {others}", style="dim"), Text(_mib(rest), style="dim"), Text(share(rest, peak.bytes))
            )
    return table


def _saved(trace: Trace) -> Table:
    from ullage.trace.events import pattern

    totals: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for module, size in trace.saved().items():
        totals[pattern(module)] += size
        counts[pattern(module)] += 1
    table = _table("left", "right", "right")
    for module, size in totals.most_common(MOST_MODULES):
        count = f"{counts[module]} x " if counts[module] > 1 else ""
        table.add_row(Text(f"{count}{module or '(root)'}"), Text(_mib(size)), Text(share(size, totals.total())))
    table.add_row(Text("all", style="bold"), Text(_mib(totals.total()), style="bold"), Text(""))
    return table


def _phases(trace: Trace) -> Table:
    table = _table("left", "right", "right", "right")
    for start, stop, name in _spans(trace):
        peak = trace.peak(start, stop)
        table.add_row(
            Text(name),
            *(Text(_mib(size)) for size in (trace.live_bytes(start - 1), peak.bytes, trace.live_bytes(stop - 1))),
        )
    return table


def _spans(trace: Trace) -> Iterator[tuple[int, int, str]]:
    for mark, following in zip(trace.marks, [*trace.marks[1:], None], strict=True):
        stop = following.at if following is not None else trace.end
        if stop > mark.at:
            yield mark.at, stop, str(mark)


def as_dict(trace: Trace) -> dict[str, object]:
    """``ullage trace --json``: all sizes are bytes, all times counts of events."""
    peak = trace.steady
    return {
        "schema": SCHEMA,
        "name": trace.name,
        "rank": trace.rank,
        "world": trace.world,
        "steps": trace.steps,
        "peak": {
            "allocated_bytes": peak.bytes,
            "at": peak.at,
            "phase": peak.phase,
            "module": peak.module,
            "op": peak.op,
        },
        "ledger": [ledger_line(line) for line in trace.ledger(peak.at)],
        "saved": [{"module": module, "bytes": size} for module, size in trace.saved().items()],
        "phases": [
            {
                "name": name,
                "start": start,
                "stop": stop,
                "start_bytes": trace.live_bytes(start - 1),
                "peak_bytes": trace.peak(start, stop).bytes,
                "end_bytes": trace.live_bytes(stop - 1),
            }
            for start, stop, name in _spans(trace)
        ],
        "allocations": [
            {
                "bytes": one.bytes,
                "category": one.category,
                "module": one.module,
                "op": one.op,
                "name": one.name,
                "birth": one.birth,
                "death": one.death,
                "phase": one.phase,
                "dtype": one.dtype,
                "shape": list(one.shape),
                "stream": one.stream,
            }
            for one in trace.allocations
        ],
        "notes": list(trace.notes),
    }


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.2f} MiB"


def _table(*justify: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for one in justify:
        table.add_column(justify=one)  # type: ignore[arg-type]
    return table


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))
