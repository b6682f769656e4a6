"""A technique on a job at a glance: its numbered steps as tables, and a pipeline's Gantt chart."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.report import words
from ullage.report.console import PLAIN_WIDTH, heading, indented
from ullage.report.gantt_text import chart
from ullage.report.show_words import cell, total
from ullage.techniques.told import Part, Shown


def show_report(shown: Shown, *, width: int = PLAIN_WIDTH, ascii_only: bool = False) -> Iterator[RenderableType]:
    """The parts of the report, top to bottom."""
    job = shown.job
    title = Text(shown.technique, style="bold")
    title.append(f"  {job.model.name} on {words.cluster(job)}", style="not bold")
    yield title
    yield indented(Text(words.whole(words.settings(job), width - 2), style="dim"))
    if job.layout.pp > 1:
        yield indented(
            Text(f"told of a rank of stage {shown.stage} of {job.layout.pp}; --rank names another", style="dim")
        )
    for number, part in enumerate(shown.parts, 1):
        yield heading(f"{number}. {part.title}")
        if part.about:
            yield indented(Text(part.about, style="dim"))
        if part.rows:
            yield indented(_table(part))
    if shown.gantt is not None:
        yield from chart(shown.gantt, width=width, ascii_only=ascii_only)
    if shown.notes:
        yield heading("Notes")
        for note in shown.notes:
            yield indented(Text(f"- {note}", style="dim"))


def _table(part: Part) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in part.columns:
        number = column.unit != "text"
        table.add_column(column.head, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in part.rows:
        table.add_row(*(Text(cell(value, column.unit)) for value, column in zip(row, part.columns, strict=True)))
    if len(part.rows) > 1 and any(column.summed for column in part.columns):
        table.add_section()
        table.add_row(*(Text(words_, style="bold") for words_ in total(part)))
    return table
