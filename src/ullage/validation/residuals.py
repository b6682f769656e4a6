"""How far measurements lie from estimates by what is uncertain in a job: the spreads that engines/interval.py widens brackets with.

A job's bracket says in bytes what it leaves open, and a measurement has a residual to each of its ends: log(measured / least) and
log(measured / most) (conformalised quantile regression holds measurements against both ends of a band in this way: Romano, Patterson and
Candès 2019). What a bracket explains widens nothing.

Kinds differ in scale far more than in shape, and most have too few measurements, of too few sources, for tails of their own. So each kind
has a scale, one for each side: a tenth of its residuals lie beyond it. In units of their kind's scale the residuals of all kinds together
say how far out the ends must lie (normalised conformal prediction: Papadopoulos, Vovk and Gammerman 2011, Regression conformal prediction
with nearest neighbours). Both are ranks: that a record lies far out counts, how far does not, so that one whose conditions nobody knows
(grade C) widens no bracket by its distance. One in fifty lies below what its weights, gradients and states take, where no low end comes:
they are counted among those below, for such will be met again.

A kind that was measured too seldom has the scale of all. Whoever has such a job comes from a source that was not seen with it, and what is
exchangeable then is the source, not the record: there each source counts as one, however many records it has (pooling of groups'
distributions: Dunn, Wasserman and Ramdas 2022, Distribution-free prediction sets for two-layer hierarchical models). A hundred small
tests of one repository would else say how sure an estimate of anything is.

Texts have no high end of their own. What varying lengths leave in a cache is in their bracket, by a mechanism and not by residuals, of
which three in four are of one source; beside it they are as uncertain as what is modelled in full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ullage.engines.interval import ALL_MODELLED, ANY, LEAST_ABOVE, TEXTS, Spread
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
    """Of the rows with a bracket, by the name of their uncertainty, and of all (ANY). Empty where there are fewer than FEWEST."""
    told = [row for row in rows if row.bracket is not None]
    high_told = [row for row in told if row.kind != TEXTS]
    if len(high_told) < FEWEST:
        return {}
    below = _ends([_Residual(row.kind, row.file, -row.beyond[0]) for row in told], BELOW)
    above = _ends([_Residual(row.kind, row.file, row.beyond[1]) for row in high_told], ABOVE)
    groups = {ANY: told}
    for row in told:
        groups.setdefault(row.kind, []).append(row)
    return {
        name: Kind(
            measurements=len(found),
            sources=tuple(sorted({row.file.removesuffix(".json") for row in found})),
            spread=Spread(
                low=math.exp(-below[name]),
                high=max(math.exp(above.get(_high_of(name), above[ANY])), 1 + LEAST_ABOVE),
            ),
        )
        for name, found in groups.items()
        if name in below
    }


def _high_of(name: str) -> str:
    return ALL_MODELLED if name == TEXTS else name


class _Residual(NamedTuple):
    """distance: outwards from one end of a bracket."""

    kind: str
    source: str
    distance: float


def _ends(told: Sequence[_Residual], share: float) -> dict[str, float]:
    """How far out an end lies, so that ``share`` of all lie beyond theirs: of each kind with a scale of its own, and of any other."""
    scales = _scales(told)
    out = max(0.0, _beyond([(one.distance / scales.get(one.kind, scales[ANY]), 1.0) for one in told], share))
    return {name: out * scale for name, scale in scales.items()}


def _scales(told: Sequence[_Residual]) -> dict[str, float]:
    of_source = Counter(one.source for one in told)
    weighed: Mapping[str, list[tuple[float, float]]] = {
        ANY: [(one.distance, 1 / of_source[one.source]) for one in told],
        **{
            name: [(one.distance, 1.0) for one in told if one.kind == name]
            for name, count in Counter(one.kind for one in told).items()
            if count >= FEWEST
        },
    }
    return {name: max(LEAST_SCALE, _beyond(found, BEYOND_SCALE)) for name, found in weighed.items()}


def _beyond(weighed: Sequence[tuple[float, float]], share: float) -> float:
    """Of n + 1 places for the next value, equally likely but for these weights, ``share`` lie out from it; with too few values, the
    outermost."""
    ordered = sorted(weighed, reverse=True)
    room = share * sum(weight for _, weight in ordered) * (1 + 1 / len(ordered))
    found = ordered[0][0]
    for value, weight in ordered:
        room -= weight
        if room < -_ROUNDING:
            break
        found = value
    return found


_ROUNDING = 1e-9
