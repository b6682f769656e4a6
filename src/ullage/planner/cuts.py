"""A pipeline that is cut over its ranks: what they recompute at the least so that it fits, and how long its step is at the least."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.engines.pipeline import takes_turns
from ullage.frozen import replace
from ullage.job.job import Job
from ullage.planner.bounds import (
    Held,
    MemoryBound,
    StageTime,
    any_chunks_bound_s,
    computing_s,
    longer_by,
    outside_bound_s,
    stage_times,
    step_bound_s,
)
from ullage.planner.shapes import ShapeCosts
from ullage.planner.space import NONE, Family, layer_by_layer
from ullage.planner.stages import Flights, Stage, flights
from ullage.planner.states import EachElement
from ullage.planner.strategies import Cut


def with_room_s(cut: Cut, stages: tuple[Stage, ...], room: MemoryBound) -> float | None:
    """A step at the least, with the recomputation without which none of its engines fits; None where nothing makes one fit.

    Every rank recomputes as many layers of its chunks as the one that must recompute most; of modules each what it must itself.
    """
    costs, family, in_flight = cut.costs, cut.family, flights(cut.job)
    if family.modular:
        again_s = _modules_again_s(cut, stages, in_flight, room)
        if again_s is None:
            return None
        plain = computing_s(costs, stages, NONE)
        wired = stage_times(costs, stages, cut.engines, NONE)
        longer = [longer_by(time, seconds) for time, seconds in zip(plain, again_s, strict=True)]
        times = [a if a.both_s > b.both_s else b for a, b in zip(longer, wired, strict=True)]
    else:
        layers = layers_again(cut, stages, cut.each, in_flight, room)
        if layers is None:
            return None
        times = stage_times(costs, stages, cut.engines, family.at_least(max(layers)))
    held = Held(costs, stages[0])
    return steps_s(costs, cut.job, times) + min([outside_bound_s(each, held, times[0]) for each in cut.engines])


def _modules_again_s(
    cut: Cut, stages: tuple[Stage, ...], in_flight: Sequence[Flights], room: MemoryBound
) -> list[float] | None:
    """Of each rank the least seconds in which sets of modules run again that make it fit, whatever the engine."""
    known: dict[
        object, float
    ] = {}  # all ranks run the same set again: of equal ones the first, which has most in flight, decides
    for stage in stages:
        if stage.first_of_kind:
            kept = _kept_bytes(cut, stage, cut.each, room)
            least = None
            if kept is not None:
                least = room.modules_again_s(cut.costs, stage, in_flight[stage.index], kept)
            if least is None:
                return None
            known[stage.chunks] = least
    return [known[stage.chunks] for stage in stages]


def layers_again(
    cut: Cut, stages: tuple[Stage, ...], each: EachElement, in_flight: Sequence[Flights], room: MemoryBound
) -> list[int] | None:
    """Of each rank the fewest layers of a chunk that it recomputes; None where nothing makes it fit. each: what it keeps at the least."""
    found = []
    for stage in stages:
        layers: int | None = 0  # of equal ranks the later ones have less in flight
        if stage.first_of_kind:
            kept = _kept_bytes(cut, stage, each, room)
            layers = None
            if kept is not None:
                layers = room.layers_again(cut.costs, stage, in_flight[stage.index], kept, cut.family)
        if layers is None:
            return None
        found.append(layers)
    return found


def _kept_bytes(cut: Cut, stage: Stage, each: EachElement, room: MemoryBound) -> float | None:
    """States between two steps, at the least; None where they have no room at a step's end."""
    kept, end = room.states_bytes(Held(cut.costs, stage), each)
    return kept if end <= room.room_bytes else None


def under_loss(cut: Cut, costs: ShapeCosts) -> Cut:
    """A cut whose loss was not chosen, with one."""
    loss = costs.job.loss
    engines = tuple(replace(one, loss=loss) for one in cut.engines)
    return replace(cut, costs=costs, job=replace(cut.job, loss=loss), engines=engines)


def of_chunks(family: Family, stages: tuple[Stage, ...]) -> Family:
    """Of layers one by one, as many as the longest chunk has."""
    if not family.layered:
        return family
    return layer_by_layer(max(sum(count for _, count, layer in part if layer) for one in stages for part in one.chunks))


def all_chunks(stage: Stage) -> bool:
    """Whether each chunk of a rank has a layer."""
    return all(any(layer for _, _, layer in part) for part in stage.chunks)


def steps_s(costs: ShapeCosts, job: Job, times: Sequence[StageTime]) -> float:
    """The bound of a schedule whose chunks are known."""
    return step_bound_s(times, job.data.grad_accum, costs.send_s(job), grouped=takes_turns(job))


def any_chunks_s(costs: ShapeCosts, job: Job, times: Sequence[StageTime], most: int) -> float:
    """The bound of a cut whose chunks are not known. most: of a rank; where it is one, that is all of its work."""
    if most == 1:
        return step_bound_s(times, job.data.grad_accum, costs.send_s(job))
    return any_chunks_bound_s(costs, times, job.data.grad_accum, costs.send_s(job))
