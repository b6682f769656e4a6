"""Which stages of a model a pipeline's ranks hold."""

from __future__ import annotations

from functools import lru_cache

from ullage.job.engine import V_SCHEDULES

BOTH_WAYS = "dualpipe"
"""The schedule whose ranks hold a stage for each of two directions, so that every stage is held twice."""


@lru_cache(maxsize=4096)
def stages_on(schedule: str, rank: int, *, pp: int, vpp: int = 1) -> tuple[int, ...]:
    """The stages of a rank's chunks, in the chunks' order: of pp x vpp stages in model order."""
    if schedule == BOTH_WAYS and pp > 1:
        return rank, pp - 1 - rank
    if schedule in V_SCHEDULES:
        return rank, 2 * pp - 1 - rank
    return tuple(chunk * pp + rank for chunk in range(vpp))
