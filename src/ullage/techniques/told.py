"""What a technique is told in: numbered parts, each a table of plain numbers. report/ makes text, JSON and pictures of it."""

from __future__ import annotations

from typing import Literal

from ullage.errors import InvalidInput
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.techniques.gantt import Gantt

Unit = Literal["text", "shape", "bytes", "seconds", "count", "flops", "share", "ratio", "number"]
"""share: of 1, shown in percent. ratio: how many times. number: bytes of one parameter, a fraction."""

Value = str | int | float | tuple[int, ...] | None


@frozen
class Column:
    """name: the key in JSON, with its unit at the end. head: the words above it. summed: whether its rows add up to something."""

    name: str
    head: str
    unit: Unit = "text"
    summed: bool = False


@frozen
class Part:
    """One step. about: one or two sentences. rows: a value for each column, None where there is none."""

    title: str
    about: str = ""
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Value, ...], ...] = ()

    def column(self, name: str) -> tuple[Value, ...]:
        """The values of a column, by its name."""
        at = [column.name for column in self.columns].index(name)
        return tuple(row[at] for row in self.rows)

    def total(self, name: str) -> int | float | None:
        """The sum of a column; None where nothing of it is known."""
        known = [value for value in self.column(name) if isinstance(value, int | float)]
        return sum(known) if known else None


@frozen
class Shown:
    """A technique on a job: what ``ullage show`` answers. stage: the pipeline stage whose rank it is told of."""

    technique: str
    job: Job
    stage: int
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    gantt: Gantt | None = None

    def part(self, title: str) -> Part:
        return next(part for part in self.parts if part.title == title)


def unused(technique: str, *, key: str, value: object, remedy: str) -> InvalidInput:
    """The job does not do this; remedy: the key that turns it on."""
    return InvalidInput(f"so this job does no {technique}", key=key, value=value, remedy=remedy)
