"""How far measurements lie from estimates by what is uncertain in a job: the spreads that engines/interval.py brackets estimates with.

A residual is log(measured / predicted). Kinds differ in scale far more than in shape, and most have too few measurements, of too few
sources, for tails of their own. So each kind has a scale, one for each side: a tenth of its residuals lie beyond it. In units of their
kind's scale the residuals of all kinds together say how far out the ends must lie (normalised conformal prediction: Papadopoulos, Vovk and
Gammerman 2011, Regression conformal prediction with nearest neighbours). Both are ranks: that a record lies far out counts, how far does
not, so that one whose conditions nobody knows (grade C) widens no bracket by its distance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ullage.engines.interval import ANY, Spread
from ullage.frozen import frozen

if TYPE_CHECKING:
    from ullage.validation.compare import Row

BELOW = 0.025
"""Share of measurements that may lie below the low end: a run that fits is called out of memory at most so often."""
ABOVE = 0.05
"""Share of measurements that may lie above the high end."""
NOMINAL = 1 - BELOW - ABOVE
FEWEST = 30
"""Residuals that a kind needs for a scale of its own; of fewer, that of all kinds is taken: a tenth of them is one table's few rows."""
BEYOND_SCALE = 0.1
LEAST_SCALE = 0.03
"""A kind whose residuals are all small has been met on few kinds of hardware and models (a chosen width)."""


@frozen
class Kind:
    """What was measured where one thing is uncertain, and the spread that it gives."""

    measurements: int
    sources: tuple[str, ...]
    spread: Spread


def kinds(rows: Iterable[Row]) -> dict[str, Kind]:
    """Of the rows with a residual, by the name of their uncertainty, and of all (ANY). Empty where there are fewer than FEWEST."""
    told = [row for row in rows if row.residual is not None]
    groups: dict[str, list[Row]] = {ANY: told}
    for row in told:
        groups.setdefault(row.kind, []).append(row)
    groups = {name: found for name, found in groups.items() if len(found) >= FEWEST}
    if not groups:
        return {}
    scales = {name: _scale(found) for name, found in groups.items()}
    below, above = _ends(told, scales)
    return {
        name: Kind(
            measurements=len(found),
            sources=tuple(sorted({row.file.removesuffix(".json") for row in found})),
            spread=Spread(low=math.exp(-below * scales[name].below), high=math.exp(above * scales[name].above)),
        )
        for name, found in groups.items()
    }


@frozen
class _Scale:
    below: float
    above: float


def _scale(rows: Sequence[Row]) -> _Scale:
    residuals = _residuals(rows)
    low, high = _tails(residuals, BEYOND_SCALE, BEYOND_SCALE)
    return _Scale(below=max(LEAST_SCALE, -low), above=max(LEAST_SCALE, high))


def _ends(rows: Sequence[Row], scales: Mapping[str, _Scale]) -> tuple[float, float]:
    """(below, above): how many scales out the ends lie."""
    scaled = []
    for row, residual in zip(rows, _residuals(rows), strict=True):
        scale = scales.get(row.kind, scales[ANY])
        scaled.append(residual / (scale.above if residual > 0 else scale.below))
    low, high = _tails(scaled, BELOW, ABOVE)
    return max(0.0, -low), max(0.0, high)


def _tails(values: Iterable[float], below: float, above: float) -> tuple[float, float]:
    """Of n + 1 equally likely places for the next value, those shares of them lie outside; with too few values, its least or largest."""
    ordered = sorted(values)
    places = len(ordered) + 1
    return ordered[max(1, int(places * below)) - 1], ordered[-max(1, int(places * above))]


def _residuals(rows: Sequence[Row]) -> list[float]:
    return [row.residual for row in rows if row.residual is not None]
