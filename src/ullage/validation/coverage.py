"""How often intervals hold: those of the estimates, and those that other measurements' residuals would give.

The widths of engines/interval.py are chosen. The check on them: a source at a time is left out, and its measurements are held against the
spread of measured over predicted in all other sources, of records in which the same is uncertain (split conformal prediction). Where that
spread holds about as often as it is meant to, residuals carry over to a source that nobody has looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ullage.frozen import frozen

if TYPE_CHECKING:
    from ullage.validation.compare import Row

NOMINAL = 0.95
FEWEST = 20
"""Residuals that a class of records needs for a spread of its own; of fewer, those of the quantity are taken, or all."""
FOLDS = 5
"""Of a single source: its records in so many parts, each left out in turn."""


@frozen
class Coverage:
    """stated: share of the measurements inside their estimate's interval. held_out: share inside the spread of other sources' residuals,
    which is meant to hold ``nominal`` of them; None where there are too few to tell."""

    measurements: int
    stated: float
    held_out: float | None
    nominal: float = NOMINAL


def coverage(rows: Iterable[Row]) -> Coverage | None:
    """Of the rows with an interval; None where there are none."""
    found = [row for row in rows if row.low is not None and row.predicted]
    if not found:
        return None
    folds = _folds(found)
    held = [
        _inside(row, [one for one, other in zip(found, folds, strict=True) if other != fold])
        for row, fold in zip(found, folds, strict=True)
    ]
    told = [one for one in held if one is not None]
    return Coverage(
        measurements=len(found),
        stated=sum(row.covered for row in found) / len(found),
        held_out=sum(told) / len(told) if len(told) == len(held) else None,
    )


def _folds(rows: Sequence[Row]) -> list[str]:
    files = {row.file for row in rows}
    if len(files) > 1:
        return [row.file for row in rows]
    ids = {name: at for at, name in enumerate(sorted({row.id for row in rows}))}
    return [str(ids[row.id] % FOLDS) for row in rows]


def _inside(row: Row, others: Sequence[Row]) -> bool | None:
    """Whether a measurement lies in the spread that the others' residuals give it; None where they are too few."""
    classes = (
        [one for one in others if (one.quantity, one.doubts) == (row.quantity, row.doubts)],
        [one for one in others if one.quantity == row.quantity],
        others,
    )
    like = next((found for found in classes if len(found) >= FEWEST), None)
    if like is None:
        return None
    ratios = sorted(one.measured / one.predicted for one in like)
    aside = int((len(ratios) + 1) * (1 - NOMINAL) / 2)  # of n + 1 equally likely places, those outside on either side
    if not aside:
        return ratios[0] <= row.measured / row.predicted <= ratios[-1]
    return ratios[aside - 1] <= row.measured / row.predicted <= ratios[-aside]
