"""Schedules by the names of the job file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from ullage.errors import InvalidInput, UnknownName, nearest
from ullage.schedule.base import Action, Shape
from ullage.schedule.building_block import v_half, v_min
from ullage.schedule.dualpipe import dualpipe, dualpipev
from ullage.schedule.gpipe import gpipe
from ullage.schedule.interleaved import interleaved
from ullage.schedule.one_f_one_b import one_f_one_b
from ullage.schedule.zbv import zbv
from ullage.schedule.zero_bubble import zb_h1, zb_h2

GENERATORS: dict[str, Callable[[Shape, int], Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe": dualpipe,
    "dualpipev": dualpipev,
}


@lru_cache(maxsize=1024)
def actions(
    schedule: str, *, stages: int, rank: int, micro_batches: int, chunks: int = 1, group_size: int | None = None
) -> tuple[Action, ...]:
    """What ``rank`` does in one optimizer step, in order."""
    shape = Shape(stages=stages, micro_batches=micro_batches, chunks=chunks, group_size=group_size)
    if not 0 <= rank < stages:
        raise InvalidInput("is no rank of the pipeline", key="rank", value=rank, allowed=f"0 to {stages - 1}")
    return tuple(_generator(schedule)(shape, rank))


def _generator(schedule: str) -> Callable[[Shape, int], Iterator[Action]]:
    known = ", ".join(GENERATORS)
    if schedule not in GENERATORS:
        meant = nearest(schedule, GENERATORS)
        raise UnknownName(
            "is no pipeline schedule",
            key="layout.schedule",
            value=schedule,
            allowed=known,
            remedy=f"did you mean {meant}?" if meant else None,
        )
    return GENERATORS[schedule]
