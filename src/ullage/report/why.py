"""The answer of ``ullage why`` for a terminal: what happened, what it was, what to change, what not to try."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.postmortem.causes import Cause
from ullage.postmortem.difference import Difference, Line
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.why import Why
from ullage.report import words
from ullage.report.console import heading, indented
from ullage.units import format_bytes

if TYPE_CHECKING:
    from ullage.postmortem.advice import Advice
    from ullage.postmortem.matching import Candidate

_NAMES = {
    "tried": "asked for",
    "capacity": "of the card",
    "free": "free",
    "allocated": "allocated",
    "reserved": "reserved",
    "other_processes": "other processes",
}
_MOST_LINES = 12
_STYLES = {"certain": "bold red", "likely": "yellow", "possible": "dim"}


def why_report(answer: Why) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    yield from _happened(answer.evidence)
    if answer.answer.doubts:
        yield heading("Is it this job?")
        yield indented(Text("\n".join(answer.answer.doubts), style="yellow"))
    yield from _causes(answer.causes)
    yield from _candidates(answer.answer.candidates, answer.evidence)
    if answer.answer.difference is not None:
        yield from _difference(answer.answer.difference)
    yield from _advice(answer.advice)
    if answer.beyond_bytes:
        more = format_bytes(answer.beyond_bytes)
        yield indented(
            Text(
                f"the run needed {more} more than the job's account says, which is added to each estimate", style="dim"
            )
        )
    if answer.in_words:
        yield heading("What helps besides", "not estimated")
        yield indented(Text("\n".join(f"{one.what}: {one.why}" for one in answer.in_words)))
    if answer.useless:
        yield heading("What does not help")
        yield indented(Text("\n".join(f"{one.what}: {one.why}" for one in answer.useless)))
    if answer.answer.unmodelled is not None:
        yield Text(f"No account of the job: {answer.answer.unmodelled}", style="dim")


def _happened(evidence: Evidence) -> Iterator[RenderableType]:
    if evidence.unread:
        yield Text("\n".join(f"Not read: {one}" for one in evidence.unread), style="yellow")
    event = evidence.event
    if event is None:
        yield heading("Nothing found", f"{evidence.source} tells of no failure that is known")
        return
    yield heading(event.recognised, f"{event.what}; {evidence.source}, line {event.line}")
    table = Table.grid(padding=(0, 2))
    for name, label in _NAMES.items():
        size = getattr(evidence.numbers, f"{name}_bytes")
        if size is not None:
            table.add_row(label, Text(format_bytes(size), justify="right"))
    yield indented(table)
    if len(evidence.ranks) > 1:
        yield indented(Text(f"{words.plural(len(evidence.ranks), 'rank')} failed; the first to tell numbers is shown"))


def _causes(causes: tuple[Cause, ...]) -> Iterator[RenderableType]:
    if not causes:
        return
    yield heading("Causes", "what speaks most for itself first")
    table = Table.grid(padding=(0, 2))
    for one in causes:
        text = Text(one.kind, style="bold")
        text.append(f": {one.why}", style="not bold")
        if one.tensor is not None and one.tensor.shape:
            text.append(f"\nshape {' x '.join(map(str, one.tensor.shape))}", style="not bold dim")
        table.add_row(Text(one.certainty, style=_STYLES[one.certainty]), text)
    yield indented(table)


def _candidates(found: tuple[Candidate, ...], evidence: Evidence) -> Iterator[RenderableType]:
    """Where the size is that of more than one tensor: each with what is allocated before it, for the reader to reject."""
    if len(found) < 2:
        return
    allocated = evidence.numbers.allocated_bytes
    told = "" if allocated is None else f"; {format_bytes(allocated)} was allocated"
    yield heading("Tensors of that size", f"the likeliest first{told}")
    table = Table.grid(padding=(0, 2))
    for one in found:
        made = one.made
        before = "not part of the modelled step"
        if made.low_bytes is not None and made.high_bytes is not None:
            before = f"beside {words.in_gib(made.low_bytes)} to {words.in_gib(made.high_bytes)}"
        table.add_row(
            Text(f"{one.likelihood:.0%}", justify="right"),
            Text(made.what),
            Text(made.moment),
            Text(before, style="dim"),
        )
    yield indented(table)


def _difference(found: Difference) -> Iterator[RenderableType]:
    """Category by category, then what it is."""
    yield heading("What differs", f"from {found.against}, {found.moment}")
    table = Table.grid(padding=(0, 2))
    for one in found.categories:
        table.add_row(*_sides(one), Text(one.category, style="bold"))
    yield indented(table)
    if not found.lines:
        yield indented(Text("nothing: every block has its twin"))
        return
    yield heading("Of it", f"{min(_MOST_LINES, len(found.lines))} of {len(found.lines):,}")
    table = Table.grid(padding=(0, 2))
    for one in found.lines[:_MOST_LINES]:
        table.add_row(*_sides(one), Text(one.category), Text(one.what or "not recorded", style="dim"))
    yield indented(table)
    if found.by_size:
        yield indented(Text("blocks that no call stack names were told by their size", style="dim"))


def _sides(one: Line) -> tuple[Text, Text]:
    sign = "+" if one.more_bytes >= 0 else "-"
    more = Text(f"{sign}{words.in_gib(abs(one.more_bytes))}", justify="right")
    return more, Text(f"{words.in_gib(one.bytes)} against {words.in_gib(one.against_bytes)}", justify="right")


def _advice(found: tuple[Advice, ...]) -> Iterator[RenderableType]:
    if not found:
        return
    yield heading("What helps", "the least time lost for the bytes freed first, each estimated as a whole job")
    table = Table.grid(padding=(0, 2))
    for one in found:
        after = one.verdict_after
        if one.low_bytes is not None and one.high_bytes is not None:
            after += f", {format_bytes(one.low_bytes)} to {format_bytes(one.high_bytes)}"
        if one.host_bytes:
            after += f"; {format_bytes(one.host_bytes)} of a node's own memory"
        slower = "" if one.slowdown_ratio is None else f"{one.slowdown_ratio:.2f} x the time"
        freed = [f"{format_bytes(one.frees_bytes)}"] if one.frees_bytes > 0 else []
        freed += [f"{format_bytes(one.frees_host_bytes)} of the host"] if one.frees_host_bytes > 0 else []
        table.add_row(Text(one.what, style="bold"), f"frees {', '.join(freed)}", slower, after)
    yield indented(table)
    last = next((one.edit for one in reversed(found) if one.edit is not None), None)
    if last is not None:
        from ullage.report.formats import coloured

        yield indented(coloured(last))
