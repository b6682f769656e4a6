"""The best strategies by exact time and exact memory, found by looking first where a bound promises most.

Every strategy waits in a queue by a lower bound of its value. The first one is taken and looked at more closely: its pipeline cut and
its least recomputation, then its exact time, at last its exact memory; each look can only raise its value. What comes out of the queue
known to the end is the best of all: whatever is left has a bound that is no better. Nothing is dropped that is not proven worse.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from ullage.engines.estimate import Estimate, estimate
from ullage.engines.pipeline import takes_turns
from ullage.errors import Infeasible, UllageError, Unsupported
from ullage.frozen import frozen, replace
from ullage.job.job import Job, Layout, Recompute
from ullage.planner.bounds import (
    Held,
    MemoryBound,
    StageTime,
    again_s,
    any_chunks_bound_s,
    computing_s,
    evenly_bound_s,
    longer_by,
    outside_bound_s,
    stage_times,
    step_bound_s,
)
from ullage.planner.costs import GridCosts, ShapeCosts
from ullage.planner.exact import first_violation, fits, may_fit, too_large
from ullage.planner.space import NONE, Family, Space, Split, layer_by_layer
from ullage.planner.splits import best_split
from ullage.planner.stages import Stage, flights, stages_of
from ullage.planner.wanted import Base, Wanted
from ullage.timing.states import is_sharded
from ullage.timing.step import StepTime, step_time

Value = tuple[float, ...]
"""What a goal makes of a strategy's seconds; the least is best."""

PATIENCE = 12
"""Strategies whose exact memory is too much before it is asked whether anything fits."""

Goal = Callable[[Job, float], Value]
"""The value of a job and its seconds a sequence."""


@frozen
class Found:
    """A strategy that fits. value: the goal's."""

    job: Job
    time: StepTime
    estimate: Estimate
    value: Value


@frozen
class Missed:
    """The most promising strategy that does not fit: what memory costs. high_bytes: of its device, at the least."""

    job: Job
    value: Value
    high_bytes: int


@dataclass
class Counts:
    """Strategies: all, those whose step was timed exactly, those proven not to fit or not to exist, and of these the ones that a
    check or an engine refuses."""

    space: int = 0
    evaluated: int = 0
    infeasible: int = 0
    refused: int = 0

    @property
    def pruned(self) -> int:
        """Proven slower than what was found."""
        return max(0, self.space - self.evaluated - self.infeasible)


@frozen
class Cut:
    """A shape over ``pp`` ranks, cut by rank. job: with its replicas and micro-batches; vpp yet open. engines: it under some stages."""

    base: Base
    costs: ShapeCosts
    job: Job
    engines: tuple[Job, ...]
    family: Family


@frozen
class Strategy:
    """All but how much is recomputed."""

    base: Base
    costs: ShapeCosts
    job: Job
    stages: tuple[Stage, ...]
    family: Family


@frozen
class Timed:
    """A strategy whole, with its exact time."""

    strategy: Strategy
    at: int
    job: Job
    time: StepTime


@dataclass
class Search:
    """want: what is free; goal: what is best; most: how many are asked for.

    exhaustive: time and replay every strategy, leaving nothing to a bound. hopeful: whether anything fits at all, asked once where a dozen
    strategies that a bound let pass did not.
    """

    want: Wanted
    bases: Sequence[Base]
    goal: Goal
    most: int = 1
    exhaustive: bool = False
    hopeful: Callable[[], bool] | None = None
    counts: Counts = field(default_factory=Counts)
    missed: Missed | None = None
    reasons: dict[str, UllageError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._queue: list[tuple[Value, int, Callable[[Value], Found | None]]] = []
        self._order = count()
        self._failed = 0
        self.space = Space(self.want)
        self._room = {id(base): MemoryBound(base.job) for base in self.bases}

    # -- the queue

    def run(self) -> list[Found]:
        """The best strategies, best first; of those that differ in no degree, engine or stage only the best."""
        for base in self.bases:
            for grid in self._grids(base):
                self._price(base, grid)
        found: dict[object, Found] = {}
        while self._queue and (self.exhaustive or len(found) < self.most):
            if self.hopeful is not None and self._failed >= PATIENCE and not found:
                hopeful, self.hopeful = self.hopeful, None
                if not hopeful():
                    self.counts.infeasible = self.counts.space - self.counts.evaluated
                    return []
            value, _, look = heapq.heappop(self._queue)
            one = look(value)
            if one is not None:
                key = same(one.job)
                found[key] = min(found.get(key, one), one, key=lambda each: each.value)
        return sorted(found.values(), key=lambda one: one.value)[: self.most]

    def _push(self, value: Value, look: Callable[[Value], Found | None]) -> None:
        heapq.heappush(self._queue, (value, next(self._order), look))

    def _value(self, job: Job, step_s: float) -> Value:
        data = job.data
        return self.goal(job, step_s / (data.micro_batch * data.grad_accum * job.layout.dp))

    # -- looks, each closer than the one before

    def _price(self, base: Base, grid: GridCosts) -> None:
        """A grid by the value where all ranks share what no expert does of its best shape's work."""
        known = []
        for job in self.space.shapes(base, grid.job):
            try:
                known.append((self._shared(job, grid.dense_s(job.data.micro_batch)), job))
            except (Unsupported, Infeasible) as error:
                self._refuse(job, error, self.space.count(base, job))
        if known:
            jobs = [job for _, job in known]
            self._push(min(value for value, _ in known), partial(self._unlowered, base, grid, jobs))

    def _unlowered(self, base: Base, grid: GridCosts, jobs: Sequence[Job], value: Value) -> None:
        """The shapes of a grid, each by the value where all ranks share what is known of its work before it is lowered."""
        for job in jobs:
            try:
                seconds = grid.least_s(job.data.micro_batch)
            except (Unsupported, Infeasible) as error:
                self._refuse(job, error, self.space.count(base, job))
                continue
            self._push(max(value, self._shared(job, seconds)), partial(self._costed, base, grid, job))

    def _costed(self, base: Base, grid: GridCosts, job: Job, value: Value) -> None:
        """A shape by the value where all ranks share its blocks' work evenly and never wait."""
        try:
            costs = ShapeCosts(grid, job)
        except (Unsupported, Infeasible) as error:
            self._refuse(job, error, self.space.count(base, job))
            return
        self._push(max(value, self._shared(job, costs.whole_s)), partial(self._piped, base, costs))

    def _shared(self, job: Job, whole_s: float) -> Value:
        """Of a micro-batch's seconds where all ranks that hold different layers or sequences share them."""
        ranks = job.cluster.gpus // (job.layout.tp * job.layout.cp)
        return self.goal(job, whole_s / (ranks * job.data.micro_batch))

    def _piped(self, base: Base, costs: ShapeCosts, value: Value) -> None:
        """A shape's pipelines, each by the value where its ranks share the blocks' work evenly, whatever its cut."""
        for job in self.space.pipelines(base, costs.job):
            if _leaves_experts_over(job.layout):
                broken = first_violation(job)
                assert broken is not None
                self._refuse(job, broken.error(), self.space.count_pipeline(base, job))
                continue
            seconds = evenly_bound_s(costs, job.layout.pp, job.data.grad_accum, costs.send_s(job))
            self._push(max(value, self._value(job, seconds)), partial(self._cut, base, costs, job))

    def _cut(self, base: Base, costs: ShapeCosts, job: Job, value: Value) -> None:
        """A pipeline, cut over its ranks evenly and in the best way."""
        cuts = self.space.cuts(base, job, self._best_split(costs, job))
        self.counts.space += sum(self.space.count_cut(base, one) for one in cuts) - self.space.count_pipeline(base, job)
        for one in cuts:
            stages = stages_of(base.job, base.graph, one.layout.pp, 1, one.layout.pp_split)
            engines = self.space.engines(base, one)
            for family in self.space.families(base, one):
                cut = Cut(base=base, costs=costs, job=one, engines=engines, family=family)
                times = computing_s(costs, stages, family.fastest)
                self._push(self._value(one, _any_chunks_s(costs, one, times)), partial(self._held, cut, stages, times))

    def _best_split(self, costs: ShapeCosts, job: Job) -> Split:
        """None where it is the even one."""
        if not self.space.has_best_cut(job):
            return None
        split = best_split(costs.layers_s, job.layout.pp, first_s=costs.first_s, last_s=costs.last_s)
        return split if len(set(split)) > 1 else None

    def _held(self, cut: Cut, stages: tuple[Stage, ...], times: list[StageTime], value: Value) -> None:
        """A cut with what it recomputes at least, if any way to divide states makes it fit; apart those that gather parameters around
        blocks, with what they send."""
        costs, job = cut.costs, cut.job
        if self.exhaustive:
            self._push(value, partial(self._chunked, cut))
            return
        for sharded in (False, True):
            one = replace(cut, engines=tuple(each for each in cut.engines if is_sharded(each) == sharded))
            if not one.engines:
                continue
            again = self._again_s(one, stages)
            if again is None:
                self.counts.infeasible += sum(map(self._counted(one), self.space.chunked(cut.base, job)))
                continue
            longer = [longer_by(time, seconds) for time, seconds in zip(times, again, strict=True)]
            wired = stage_times(costs, stages, one.engines, cut.family.fastest)
            slower = [a if a.both_s > b.both_s else b for a, b in zip(longer, wired, strict=True)]
            held = Held(costs, stages[0])
            outside = min(outside_bound_s(each, held, slower[0]) for each in one.engines)
            self._push(self._value(job, _any_chunks_s(costs, job, slower) + outside), partial(self._chunked, one))

    def _counted(self, cut: Cut) -> Callable[[Job], int]:
        """Strategies that a cut was counted with, by its number of chunks."""
        return lambda chunked: len(cut.engines) * self.space.count_family(cut.base, chunked, cut.family)

    def _again_s(self, cut: Cut, stages: tuple[Stage, ...]) -> list[float] | None:
        """Of each rank the least seconds of recomputation that make it fit, whatever the engine and the chunks; None where nothing does."""
        in_flight = _under_1f1b(cut.job)
        if not cut.family.modular:
            again = self._layers_again(cut, stages, cut.engines, in_flight)
            if again is None:
                return None
            return [again_s(cut.costs, stage, layers) for stage, layers in zip(stages, again, strict=True)]
        found: list[float] = []
        for stage in stages:
            seconds = found[-1] if found else 0.0
            if stage.first_of_kind:
                kept = self._kept_bytes(cut, stage, cut.engines)
                if kept is None:
                    return None
                room = self._room[id(cut.base)]
                least = room.modules_again_s(cut.costs, stage, in_flight[stage.index], kept)
                if least is None:
                    return None
                seconds = least
            found.append(seconds)
        return found

    def _layers_again(
        self, cut: Cut, stages: tuple[Stage, ...], engines: Sequence[Job], in_flight: Sequence[int]
    ) -> list[int] | None:
        """Of each rank the fewest layers of a chunk that it recomputes, whatever the engine; None where nothing makes it fit."""
        room = self._room[id(cut.base)]
        found = []
        for stage in stages:
            layers: int | None = 0  # of equal ranks the later ones have less in flight
            if stage.first_of_kind:
                kept = self._kept_bytes(cut, stage, engines)
                layers = None
                if kept is not None:
                    layers = room.layers_again(cut.costs, stage, in_flight[stage.index], kept, cut.family)
            if layers is None:
                return None
            found.append(layers)
        return found

    def _kept_bytes(self, cut: Cut, stage: Stage, engines: Sequence[Job]) -> float | None:
        """States between two steps, at the least; None where they have no room at a step's end."""
        room, held = self._room[id(cut.base)], Held(cut.costs, stage)
        kept, end = (min(each) for each in zip(*(room.states_bytes(held, job) for job in engines), strict=True))
        return kept if end <= room.room_bytes else None

    def _chunked(self, cut: Cut, value: Value) -> None:
        """Every number of model chunks a rank."""
        base, costs, counted = cut.base, cut.costs, self._counted(cut)
        for job in self.space.chunked(base, cut.job):
            stages = stages_of(base.job, base.graph, job.layout.pp, job.layout.vpp, job.layout.pp_split)
            if not all(map(_all_chunks, stages)):
                self.counts.infeasible += counted(job)
                continue
            one = replace(cut, job=job, family=_of_chunks(cut.family, stages))
            self.counts.space += len(one.engines) * len(one.family.kinds) - counted(job)
            seconds = _steps_s(costs, job, computing_s(costs, stages, NONE))
            self._push(max(value, self._value(job, seconds)), partial(self._sharded, one, stages))

    def _sharded(self, cut: Cut, stages: tuple[Stage, ...], value: Value) -> None:
        """Every way to divide states over replicas; of sets of modules each that no other beats."""
        if cut.family.modular and not self.exhaustive:
            for recompute in cut.costs.selections:
                self._sharded(replace(cut, family=Family(kinds=(recompute,))), stages, value)
            return
        costs, family = cut.costs, cut.family
        in_flight = flights(cut.job)
        known: dict[Recompute, list[StageTime]] = {}
        for with_engine in cut.engines:
            job = replace(cut.job, engine=with_engine.engine)
            strategy = Strategy(base=cut.base, costs=costs, job=job, stages=stages, family=family)
            if self.exhaustive:
                for at in range(len(family.kinds)):
                    self._push(self._bound(strategy, at), partial(self._timed, strategy, at))
                continue
            again = self._layers_again(cut, stages, [job], in_flight)
            if again is None:
                self.counts.infeasible += len(family.kinds)
                continue
            # all ranks recompute as many as the one that must recompute most
            recompute = family.kinds[min(max(again), len(family.kinds) - 1)]
            if is_sharded(job):
                times = stage_times(costs, stages, [job], recompute)
            else:  # the same whatever the stage
                times = known[recompute] = known.get(recompute) or computing_s(costs, stages, recompute)
            self._push(max(value, self._at_best(strategy, times)), partial(self._fitted, strategy))

    def _fitted(self, strategy: Strategy, value: Value) -> None:
        """The first recomputation that a bound of memory leaves."""
        first = self._first_that_may_fit(strategy)
        self.counts.infeasible += first
        if first < len(strategy.family.kinds):
            self._push(self._bound(strategy, first), partial(self._timed, strategy, first))

    def _first_that_may_fit(self, strategy: Strategy) -> int:
        """Each recomputation leaves less behind than the one before, so halving finds it."""
        kinds = strategy.family.kinds
        return bisect_left(kinds, True, key=lambda recompute: self._may_fit(strategy, recompute))

    def _may_fit(self, strategy: Strategy, recompute: Recompute) -> bool:
        room = self._room[id(strategy.base)]
        return all(
            room.stage_bytes(strategy.costs, stage, strategy.job, recompute) <= room.room_bytes
            for stage in strategy.stages
            if stage.first_of_kind
        )

    def _bound(self, strategy: Strategy, at: int) -> Value:
        recompute = strategy.family.kinds[at]
        return self._at_best(strategy, stage_times(strategy.costs, strategy.stages, [strategy.job], recompute))

    def _at_best(self, strategy: Strategy, times: list[StageTime]) -> Value:
        """No strategy is faster than its ranks' ``times`` and what comes after them."""
        job, costs = strategy.job, strategy.costs
        outside = outside_bound_s(job, Held(costs, strategy.stages[0]), times[0])
        return self._value(job, _steps_s(costs, job, times) + outside)

    def _timed(self, strategy: Strategy, at: int, value: Value) -> None:
        """The exact time."""
        job = replace(strategy.job, recompute=strategy.family.kinds[at])
        rest = 1 if self.exhaustive else len(strategy.family.kinds) - at
        broken = first_violation(job)
        if broken is not None:
            self._refuse(job, broken.error(), rest)
            return
        try:
            time = step_time(job, strategy.base.graph)
        except (Unsupported, Infeasible) as error:
            self._refuse(job, error, rest)
            return
        self.counts.evaluated += 1
        timed = Timed(strategy=strategy, at=at, job=job, time=time)
        self._push(self._value(job, time.step_s), partial(self._answered, timed))

    def _answered(self, timed: Timed, value: Value) -> Found | None:
        """The exact memory."""
        job, strategy = timed.job, timed.strategy
        rest = 1 if self.exhaustive else len(strategy.family.kinds) - timed.at
        try:
            high = too_large(job, strategy.base.graph)
            answer = None if high else estimate(job, strategy.base.graph)
        except (Unsupported, Infeasible) as error:
            self.counts.evaluated -= 1
            self._refuse(job, error, rest)
            return None
        if answer is not None and answer.verdict == "fits":
            return Found(job=job, time=timed.time, estimate=answer, value=value)
        if self.missed is None:
            self.missed = Missed(
                job=job, value=value, high_bytes=answer.peak.high_bytes if answer is not None else high
            )
        self.counts.evaluated -= 1
        self._failed += 1
        at = timed.at + 1 if rest == 1 else self._first_left(strategy, timed.at + 1, exact=answer is not None)
        self.counts.infeasible += at - timed.at
        if at < len(strategy.family.kinds) and not self.exhaustive:
            self._push(self._bound(strategy, at), partial(self._timed, strategy, at))
        return None

    def _first_left(self, strategy: Strategy, low: int, *, exact: bool) -> int:
        """The first recomputation that its account leaves, recomputing more layers being taken not to raise it: the smallest first, then by
        halving. exact: with the allocator simulated, which costs more than to time one that does not fit after all."""
        kinds, graph = strategy.family.kinds, strategy.base.graph
        leaves = fits if exact else may_fit

        def left(recompute: Recompute) -> bool:
            return leaves(replace(strategy.job, recompute=recompute), graph)

        return bisect_left(kinds, True, lo=low, hi=len(kinds) - 1, key=left) if left(kinds[-1]) else len(kinds)

    def _refuse(self, job: Job, error: UllageError, strategies: int) -> None:
        self.reasons.setdefault(job.engine.name, error)
        self.counts.infeasible += strategies
        self.counts.refused += strategies

    def _grids(self, base: Base) -> Iterator[GridCosts]:
        """Degrees that divide blocks, with each loss, and what blocks cost under them."""
        beside: dict[
            object, GridCosts
        ] = {}  # of each tensor, sequence and context parallelism and loss, whatever the experts'
        for jobs in self.space.grids(base):
            broken = first_violation(jobs[0])
            like: GridCosts | None = None
            for job in jobs:
                strategies = sum(self.space.count(base, shape) for shape in self.space.shapes(base, job))
                self.counts.space += strategies
                if broken is not None:  # whatever the pipeline
                    self._refuse(job, broken.error(), strategies)
                elif strategies:
                    key = job.layout.tp, job.layout.cp, job.layout.sp, job.loss
                    like = GridCosts(job, base.graph, like, beside.get(key))
                    beside.setdefault(key, like)
                    yield like


def _steps_s(costs: ShapeCosts, job: Job, times: Sequence[StageTime]) -> float:
    """The bound of a schedule whose chunks are known."""
    return step_bound_s(times, job.data.grad_accum, costs.send_s(job), grouped=takes_turns(job))


def _any_chunks_s(costs: ShapeCosts, job: Job, times: Sequence[StageTime]) -> float:
    """The bound of a cut whose chunks are not known."""
    return any_chunks_bound_s(costs, times, job.data.grad_accum, costs.send_s(job))


def _under_1f1b(job: Job) -> list[int]:
    """Micro-batches in flight on each rank: however a rank's layers are cut into chunks, no less is in flight."""
    return [min(job.layout.pp - rank, job.data.grad_accum) for rank in range(job.layout.pp)]


def _leaves_experts_over(layout: Layout) -> bool:
    """Whether experts' ranks do not divide those of a pipeline stage."""
    return (layout.dp * layout.cp * layout.tp) % (layout.ep * layout.etp) != 0


def _of_chunks(family: Family, stages: tuple[Stage, ...]) -> Family:
    """Of layers one by one, as many as the longest chunk has."""
    if not family.layered:
        return family
    return layer_by_layer(max(sum(count for _, count, layer in part if layer) for one in stages for part in one.chunks))


def _all_chunks(stage: Stage) -> bool:
    """Whether each chunk of a rank has a layer."""
    return all(any(layer for _, _, layer in part) for part in stage.chunks)


def same(job: Job) -> object:
    """Strategies that a person would call the same: of their micro-batches, cuts and recomputation only the best counts."""
    layout = job.layout
    return (job.engine.name, layout.tp, layout.cp, layout.pp, layout.ep, job.engine.zero_stage)
