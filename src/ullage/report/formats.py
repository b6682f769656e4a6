"""A checked file at a glance: the verdict, what is wrong with the file, and the edit; and what a written file does not say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.formats.check import Check
from ullage.formats.convert import Conversion
from ullage.formats.reading import Finding, Leftover
from ullage.report import words
from ullage.report.console import heading, indented
from ullage.report.terminal import head

STYLES = {"error": "bold red", "warning": "yellow", "advice": "cyan"}
_ORDER = tuple(STYLES)
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def check_report(answer: Check, *, width: int) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    yield from head(answer.estimate, width)
    yield from _findings(answer.findings)
    if answer.edit is not None:
        yield heading("The smallest edit that helps", answer.helps or "")
        yield indented(coloured(answer.edit))
    elif answer.estimate.verdict != "fits":
        yield heading("No edit of this file alone makes it fit", "ullage estimate --explain shows where the memory is")
    yield from _leftovers(answer.leftovers)


def _findings(found: Sequence[Finding]) -> Iterator[RenderableType]:
    yield heading("Findings", words.plural(len(found), "finding"))
    table = Table.grid(padding=(0, 2))
    for one in sorted(found, key=lambda one: _ORDER.index(one.severity)):
        text = Text(one.key, style="bold")
        text.append(f": {one.what}", style="not bold")
        text.append(f"\n→ {one.remedy}", style="not bold dim")
        table.add_row(Text(one.severity, style=STYLES[one.severity]), text)
    yield indented(table)


def coloured(edit: str) -> Text:
    text = Text()
    for line in edit.splitlines(keepends=True):
        text.append(line, style=_DIFF_STYLES.get(line[:1], ""))
    return text


def _leftovers(found: Sequence[Leftover]) -> Iterator[RenderableType]:
    if not found:
        return
    yield heading("Left over", f"{words.plural(len(found), 'key')} of the file that no job holds")
    table = Table.grid(padding=(0, 2))
    for one in found:
        table.add_row(Text(one.key), Text(one.why, style="dim"))
    yield indented(table)


def told(answer: Conversion) -> Iterator[str]:
    """Lines for stderr: what the text does not say, what its reader must fill in, and what of the source stays behind."""
    for one in answer.unsaid:
        yield f"not said: {one}"
    for note in answer.notes:
        yield f"note: {note}"
    for left in answer.leftovers:
        yield f"left over: {left.key}: {left.why}"
