"""How far a set of predictions lies from what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ullage.frozen import frozen
from ullage.units import GIB
from ullage.validation.records import GRADES, QUANTITIES

if TYPE_CHECKING:
    from ullage.validation.compare import Row

SPLIT_BYTES = 4 * GIB
"""Below this, workspaces, the allocator's rounding and a library's own small buffers show in a relative error."""


@frozen
class Summary:
    """Absolute relative errors of one group of rows, and the median of the signed ones: is the prediction mostly early or late?

    covered: share whose measurement lies in low..high; None where nothing was bracketed.
    """

    quantity: str
    grade: str
    records: int
    median: float
    mean: float
    p90: float
    worst: float
    signed_median: float
    covered: float | None
    least_bytes: int = 0
    below_bytes: int | None = None
    file: str = ""


def by_quantity(rows: Iterable[Row]) -> tuple[Summary, ...]:
    """One Summary for each quantity and grade that has a row."""
    return _grouped(rows, lambda row: (QUANTITIES.index(row.quantity), GRADES.index(row.grade)), _plain)


def by_size(rows: Iterable[Row]) -> tuple[Summary, ...]:
    """Allocated memory by grade, from SPLIT_BYTES on and below."""
    allocated = [row for row in rows if row.quantity == "allocated"]
    return _grouped(allocated, lambda row: (GRADES.index(row.grade), row.measured < SPLIT_BYTES), _sized)


def by_file(rows: Iterable[Row]) -> tuple[Summary, ...]:
    """One Summary for each file, quantity and grade."""
    return _grouped(rows, lambda row: (row.file, QUANTITIES.index(row.quantity), GRADES.index(row.grade)), _filed)


Key = Callable[["Row"], tuple[object, ...]]


def _grouped(rows: Iterable[Row], key: Key, make: Callable[[Sequence[Row]], Summary]) -> tuple[Summary, ...]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.error_ratio is not None:
            groups.setdefault(key(row), []).append(row)
    return tuple(make(groups[found]) for found in sorted(groups, key=lambda one: tuple(map(_order, one))))


def _order(part: object) -> str:
    return f"{part:09d}" if isinstance(part, int) else str(part)


def _plain(rows: Sequence[Row]) -> Summary:
    return _summary(rows)


def _sized(rows: Sequence[Row]) -> Summary:
    small = rows[0].measured < SPLIT_BYTES
    return _summary(rows, least_bytes=0 if small else SPLIT_BYTES, below_bytes=SPLIT_BYTES if small else None)


def _filed(rows: Sequence[Row]) -> Summary:
    return _summary(rows, file=rows[0].file)


def _summary(rows: Sequence[Row], *, least_bytes: int = 0, below_bytes: int | None = None, file: str = "") -> Summary:
    errors = sorted(abs(row.error_ratio) for row in rows if row.error_ratio is not None)
    return Summary(
        quantity=rows[0].quantity,
        grade=rows[0].grade,
        records=len(errors),
        median=statistics.median(errors),
        mean=statistics.fmean(errors),
        p90=errors[math.ceil(0.9 * len(errors)) - 1],
        worst=errors[-1],
        signed_median=statistics.median(row.error_ratio for row in rows if row.error_ratio is not None),
        covered=sum(row.covered for row in rows) / len(rows) if any(row.low is not None for row in rows) else None,
        least_bytes=least_bytes,
        below_bytes=below_bytes,
        file=file,
    )
