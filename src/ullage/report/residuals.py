"""engines/data/residuals.toml: what `ullage validate --residuals` writes, and engines/interval.py reads."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor
from typing import TYPE_CHECKING

from ullage.engines.interval import ANY, KINDS
from ullage.report.words import plural
from ullage.validation.residuals import ABOVE, BELOW, kinds

if TYPE_CHECKING:
    from ullage.validation.compare import Validation

_HEAD = f"""\
# Written by `make residuals TRUTH=PATH` (ullage validate PATH --residuals), as validation/residuals.py says; not edited by hand.
# {{runs}} as shares of what their jobs' brackets go from and to, by what is most uncertain in the job: low and high are
# meant to leave {100 * BELOW:.1f} % of measurements below and {100 * ABOVE:.1f} % above. sources: the files of records.
"""


def residuals_text(found: Validation) -> str:
    """TOML: a table for each kind with enough measurements, in the order of KINDS."""
    told = kinds(found.rows)
    parts = [_HEAD.format(runs=plural(sum(row.bracket is not None for row in found.rows), "measurement"))]
    for name in (*KINDS, ANY):
        if name in told:
            one = told[name]
            sources = ", ".join(f'"{source}"' for source in one.sources)
            parts.append(
                f"[kinds.{name}]\nmeasurements = {one.measurements}\nsources = [{sources}]\n"
                f"low = {_outwards(one.spread.low, floor):.3f}\nhigh = {_outwards(one.spread.high, ceil):.3f}\n"
            )
    return "\n".join(parts)


def _outwards(share: float, whole: Callable[[float], int]) -> float:
    """To three digits: an end lies at a measurement, which no rounding may leave out."""
    return whole(1000 * share) / 1000
