"""How often intervals hold: those of the estimates, and those that other measurements' residuals would give.

The spreads of engines/interval.py are made of measured runs, so that these lie in them by making. The check on them: a source at a time is
left out, and its measurements are held against the spreads of all other sources (validation/residuals.py). Where those hold about as often
as they are meant to, they carry over to a source that nobody has looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ullage.engines.interval import ANY
from ullage.frozen import frozen
from ullage.validation.residuals import NOMINAL, Kind, kinds

if TYPE_CHECKING:
    from ullage.validation.compare import Row

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
    found = [row for row in rows if row.residual is not None]
    if not found:
        return None
    folds = _folds(found)
    others = {
        fold: kinds(one for one, other in zip(found, folds, strict=True) if other != fold)
        for fold in sorted(set(folds))
    }
    told = all(others.values())
    held = [_inside(row, others[fold]) for row, fold in zip(found, folds, strict=True)] if told else []
    return Coverage(
        measurements=len(found),
        stated=sum(row.covered for row in found) / len(found),
        held_out=sum(held) / len(held) if held else None,
    )


def _folds(rows: Sequence[Row]) -> list[str]:
    files = {row.file for row in rows}
    if len(files) > 1:
        return [row.file for row in rows]
    ids = {name: at for at, name in enumerate(sorted({row.id for row in rows}))}
    return [str(ids[row.id] % FOLDS) for row in rows]


def _inside(row: Row, others: Mapping[str, Kind]) -> bool:
    assert row.residual is not None
    found = others.get(row.kind, others[ANY]).spread
    return math.log(found.low) <= row.residual <= math.log(found.high)
