"""Between measured places."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


def interpolated(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """Linear in the logarithm of the place; the end's value beyond an end."""
    if place <= places[0]:
        return values[0]
    if place >= places[-1]:
        return values[-1]
    above = bisect_left(places, place)
    low, high = places[above - 1], places[above]
    part = math.log(place / low) / math.log(high / low)
    return values[above - 1] + (values[above] - values[above - 1]) * part
