"""A pipeline that is cut over its ranks: what they recompute at the least so that it fits, and how long its step is at the least."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.engines.pipeline import takes_turns
from ullage.frozen import replace
from ullage.job.job import Job
from ullage.planner.bounds import Held, MemoryBound, StageTime, again_s, any_chunks_bound_s, step_bound_s
from ullage.planner.shapes import ShapeCosts
from ullage.planner.space import Family, layer_by_layer
from ullage.planner.stages import Stage
from ullage.planner.states import EachElement, each_element
from ullage.planner.strategies import Cut


def again_of(cut: Cut, stages: tuple[Stage, ...], room: MemoryBound) -> list[float] | None:
    """Of each rank the least seconds of recomputation that make it fit, whatever the engine and the chunks; None where nothing does."""
    in_flight = _under_1f1b(cut.job)
    if not cut.family.modular:
        again = layers_again(cut, stages, cut.engines, in_flight, room)
        if again is None:
            return None
        return [again_s(cut.costs, stage, layers) for stage, layers in zip(stages, again, strict=True)]
    found: list[float] = []
    each = [each_element(one) for one in cut.engines]
    for stage in stages:
        seconds = found[-1] if found else 0.0
        if stage.first_of_kind:
            kept = _kept_bytes(cut, stage, each, room)
            if kept is None:
                return None
            least = room.modules_again_s(cut.costs, stage, in_flight[stage.index], kept)
            if least is None:
                return None
            seconds = least
        found.append(seconds)
    return found


def layers_again(
    cut: Cut, stages: tuple[Stage, ...], engines: Sequence[Job], in_flight: Sequence[int], room: MemoryBound
) -> list[int] | None:
    """Of each rank the fewest layers of a chunk that it recomputes, whatever the engine; None where nothing makes it fit."""
    found = []
    each = [each_element(one) for one in engines]
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


def _kept_bytes(cut: Cut, stage: Stage, engines: Sequence[EachElement], room: MemoryBound) -> float | None:
    """States between two steps, at the least; None where they have no room at a step's end."""
    held = Held(cut.costs, stage)
    kept, end = (min(each) for each in zip(*[room.states_bytes(held, one) for one in engines], strict=True))
    return kept if end <= room.room_bytes else None


def _under_1f1b(job: Job) -> list[int]:
    """Micro-batches in flight on each rank: however a rank's layers are cut into chunks, no less is in flight."""
    return [min(job.layout.pp - rank, job.data.grad_accum) for rank in range(job.layout.pp)]


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
