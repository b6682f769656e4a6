"""How often intervals hold: those of the estimates, and those that other measurements' residuals would give.

The spreads of engines/interval.py are made of measured runs, so that these lie in them by making. The check on them: a source at a time is
left out, and its measurements are held against the whole intervals that the spreads of all other sources give (validation/residuals.py).
Where those hold about as often as they are meant to, they carry over to a source that nobody has looked at. How sources differ shows in
their mean, in which a small one counts as much as a large one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from ullage.engines.interval import ANY
from ullage.frozen import frozen
from ullage.validation.residuals import NOMINAL, kinds

if TYPE_CHECKING:
    from ullage.validation.compare import Row

FOLDS = 5
"""Of a single source: its records in so many parts, each left out in turn."""


@frozen
class Coverage:
    """stated: share of the measurements inside their estimate's interval. held_out: share inside that of other sources' residuals, which is
    meant to hold ``nominal`` of them, and the mean of the sources' shares; None where there are too few to tell, of one source."""

    measurements: int
    stated: float
    held_out: float | None
    mean_of_sources: float | None = None
    nominal: float = NOMINAL


def coverage(rows: Iterable[Row]) -> Coverage | None:
    """Of the rows with an interval; None where there are none."""
    found = [row for row in rows if row.bracket is not None]
    if not found:
        return None
    folds = _folds(found)
    of_fold: dict[str, list[Row]] = {}
    for row, fold in zip(found, folds, strict=True):
        of_fold.setdefault(fold, []).append(row)
    held: dict[str, list[bool]] = {}
    for fold, left_out in of_fold.items():
        others = kinds(row for row, other in zip(found, folds, strict=True) if other != fold)
        if others:
            held[fold] = [row.held_by(others.get(row.kind, others[ANY]).spread) for row in left_out]
    told = len(held) == len(of_fold)
    several = len({row.file for row in found}) > 1
    return Coverage(
        measurements=len(found),
        stated=sum(row.covered for row in found) / len(found),
        held_out=fmean(one for each in held.values() for one in each) if told else None,
        mean_of_sources=fmean(fmean(each) for each in held.values()) if told and several else None,
    )


def _folds(rows: Sequence[Row]) -> list[str]:
    files = {row.file for row in rows}
    if len(files) > 1:
        return [row.file for row in rows]
    ids = {name: at for at, name in enumerate(sorted({row.id for row in rows}))}
    return [str(ids[row.id] % FOLDS) for row in rows]
