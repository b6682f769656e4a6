"""Schedules by the names of the job file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from ullage.errors import InvalidInput, UnknownName, Unsupported, nearest
from ullage.schedule.base import Action, Shape
from ullage.schedule.gpipe import gpipe
from ullage.schedule.interleaved import interleaved
from ullage.schedule.one_f_one_b import one_f_one_b

GENERATORS: dict[str, Callable[[Shape, int], Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved,
}
# They split the backward in two or place chunks in a V, which Action does not say yet.
NOT_MODELLED = ("zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe", "dualpipev")


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
    if schedule in NOT_MODELLED:
        raise Unsupported(
            "this pipeline schedule is not modelled yet", key="layout.schedule", value=schedule, allowed=known
        )
    if schedule not in GENERATORS:
        meant = nearest(schedule, (*GENERATORS, *NOT_MODELLED))
        raise UnknownName(
            "is no pipeline schedule",
            key="layout.schedule",
            value=schedule,
            allowed=known,
            remedy=f"did you mean {meant}?" if meant else None,
        )
    return GENERATORS[schedule]
