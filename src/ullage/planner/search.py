"""The best strategies by exact time and exact memory, found by looking first where a bound promises most.

Every strategy waits in a queue by a lower bound of its value. The first one is taken and looked at more closely: its pipeline cut and
its least recomputation, then its exact time, at last its exact memory; each look can only raise its value. What comes out of the queue
known to the end is the best of all: whatever is left has a bound that is no better. Nothing is dropped that is not proven worse.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import itemgetter

from ullage.engines.estimate import estimate
from ullage.errors import Infeasible, UllageError, Unsupported
from ullage.frozen import replace
from ullage.job.job import Engine, Job, Recompute
from ullage.planner.balance import Least, Pipe, kept_of, least_of
from ullage.planner.bounds import (
    Held,
    MemoryBound,
    StageTime,
    computing_s,
    ends_bound_s,
    evenly_bound_s,
    outside_bound_s,
    stage_times,
)
from ullage.planner.collected import collected_later
from ullage.planner.cuts import all_chunks, any_chunks_s, layers_again, of_chunks, steps_s, under_loss, with_room_s
from ullage.planner.exact import first_error, leaves_experts_over, out_of_reach, refusal
from ullage.planner.grids import Grid, Grids, grids_of, least_dense_s
from ullage.planner.known import ExactRoom, Known
from ullage.planner.shapes import LeastCosts, ShapeCosts
from ullage.planner.space import FULL, Family, Space
from ullage.planner.stages import Stage, flights, stages_of
from ullage.planner.states import each_element
from ullage.planner.strategies import Counts, Cut, Found, Goal, Missed, Pipeline, Strategy, Timed, Value, same
from ullage.planner.wanted import Base, Wanted
from ullage.timing.states import is_sharded
from ullage.timing.step import step_time

PATIENCE = 12
"""Strategies whose exact memory is too much before it is asked whether anything fits."""


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
        self._known = Known(self.space)
        self._room = {id(base): MemoryBound(base.job, tight=self.want.tight) for base in self.bases}
        self._exact = ExactRoom(tight=self.want.tight)

    # -- the queue

    def run(self) -> list[Found]:
        """The best strategies, best first; of those that differ in no degree, engine or stage only the best."""
        with collected_later():
            return self._run()

    def _run(self) -> list[Found]:
        for base in self.bases:
            for grids in self._grids(base):
                self._price(base, grids)
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

    def _price(self, base: Base, grids: Grids) -> None:
        """Grids that differ in expert parallelism alone, by the value where all ranks share what no expert does of the layers of one kind,
        in their best shape."""
        first = next(grids.costs(), None)
        if first is not None:
            shapes = self.space.shapes(base, first[0].job)
            layers_s = self._each_shape(base, grids, shapes, first[0].layers_s)
            if layers_s:
                look = partial(self._weighed, base, grids, [one for one, _, _ in layers_s])
                self._push(min(value for _, _, value in layers_s), look)

    def _weighed(self, base: Base, grids: Grids, shapes: Sequence[Job], value: Value) -> None:
        """These by what no expert does of all blocks, under whichever loss takes least."""
        first = next(grids.costs())
        found = self._each_shape(base, grids, shapes, partial(least_dense_s, first))
        if found:
            dense_s = {one.data.micro_batch: seconds for one, seconds, _ in found}
            self._push(max(value, min(shared for _, _, shared in found)), partial(self._spread, base, grids, dense_s))

    def _each_shape(
        self, base: Base, grids: Grids, shapes: Sequence[Job], ask: Callable[[int], float]
    ) -> list[tuple[Job, float, Value]]:
        """Of each shape what is asked by its micro-batch, and the value where all ranks share it."""
        found = []
        for job in shapes:
            try:
                seconds = ask(job.data.micro_batch)
                found.append((job, seconds, self._shared(base, job, seconds)))
            except (Unsupported, Infeasible) as error:
                for grid in grids.costs():
                    self._refuse(grid[0].job, error, len(grid) * self.space.count(base, job))
        return found

    def _spread(self, base: Base, grids: Grids, dense_s: Mapping[int, float], value: Value) -> None:
        """Each of them with each micro-batch, by the value where all ranks share what is known of its work before it is lowered.

        dense_s: of each micro-batch what no expert does, whatever the loss.
        """
        for grid in grids.costs():
            shapes = []
            for job in self.space.shapes(base, grid[0].job):
                micro_batch = job.data.micro_batch
                if micro_batch not in dense_s:
                    continue
                try:
                    whole_s = dense_s[micro_batch] + grid[0].experts_s(micro_batch)
                    shared = self._shared(base, job, whole_s, grid[0].least_layer_s(micro_batch))
                except (Unsupported, Infeasible) as error:
                    self._refuse(job, error, len(grid) * self.space.count(base, job))
                    continue
                shapes.append((max(value, shared), job))
            if shapes:
                shapes.sort(key=itemgetter(0), reverse=True)
                self._push(shapes[-1][0], partial(self._next_shape, base, grid, shapes))

    def _next_shape(self, base: Base, grid: Grid, shapes: list[tuple[Value, Job]], value: Value) -> None:
        """Shapes of a grid, the last of which has the least value: it is looked at, the others wait."""
        _, job = shapes.pop()
        if shapes:
            self._push(shapes[-1][0], partial(self._next_shape, base, grid, shapes))
        self._costed(base, grid, job, value)

    def _costed(self, base: Base, grid: Grid, job: Job, value: Value) -> None:
        """A shape by the value where all ranks share its blocks' work evenly, whatever its pipeline, under the losses that leave room."""
        found: list[ShapeCosts] = []
        for one in grid:
            with_loss = replace(job, loss=one.job.loss)
            try:
                if not self.exhaustive and one.head_bytes(job.data.micro_batch) > self._room[id(base)].room_bytes:
                    self.counts.infeasible += self.space.count(base, job)
                    continue
                like = next((other for other in found if other.grid is one.like), None)
                found.append(ShapeCosts(one, with_loss, like))
            except (Unsupported, Infeasible) as error:
                self._refuse(with_loss, error, self.space.count(base, job))
        if found:
            costs = LeastCosts(found) if len(found) > 1 else found[0]
            value = max(value, self._shared(base, job, costs.whole_s, costs.shortest_s))
            self._push(value, partial(self._piped, base, costs))

    def _shared(self, base: Base, job: Job, whole_s: float, layer_s: float = 0.0) -> Value:
        """Of a micro-batch's seconds where all ranks share them, once they have waited for layers of ``layer_s`` at the least."""
        ranks = job.cluster.gpus // (job.layout.tp * job.layout.cp)
        return self.goal(job, (whole_s / ranks + layer_s * self.space.waits(base, job)) / job.data.micro_batch)

    def _piped(self, base: Base, costs: ShapeCosts, value: Value) -> None:
        """A shape's pipelines, each by the value where its ranks share the blocks' work evenly, whatever its cut."""
        for job in self.space.pipelines(base, costs.job):
            error = partial(first_error, job) if leaves_experts_over(job.layout) else out_of_reach(job)
            if error is not None:
                self._refuse(job, error, len(costs.under) * self.space.count_pipeline(base, job))
                continue
            pipe = job.layout.pp, job.data.grad_accum, costs.send_s(job)
            seconds = evenly_bound_s(costs, *pipe, interleaves=self.space.interleaves(job))
            pipeline = Pipeline(base=base, costs=costs, job=job, even_s=seconds)
            self._push(max(value, self._value(job, seconds)), partial(self._staged, pipeline))

    def _staged(self, pipeline: Pipeline, value: Value) -> None:
        """A pipeline under engines' stages, those together that send the same, by what they send."""
        base, costs, job = pipeline.base, pipeline.costs, pipeline.job
        if self.exhaustive:
            engines = tuple([one.engine for one in self.space.engines(base, job)])
            for at in range(len(self.space.families(base, job))):
                self._push(value, partial(self._cut, pipeline, engines, at))
            return
        pipe = Pipe(ranks=job.layout.pp, micro_batches=job.data.grad_accum, send_s=costs.send_s(job))
        for alikes in self._known.engines(base, job):
            if kept_of(costs.grid, job, alikes).states_bytes > pipe.ranks * self._room[id(base)].room_bytes:
                families = sum(self.space.count_families(base, job))
                self.counts.infeasible += len(costs.under) * len(alikes) * families
                continue
            least = least_of(costs.grid, job, alikes)
            seconds = max(pipeline.even_s, least.sent_s(costs.grid, pipe))
            look = partial(self._balanced, pipeline, alikes, pipe, least, seconds)
            self._push(max(value, self._value(job, seconds)), look)

    def _balanced(
        self, pipeline: Pipeline, engines: Sequence[Engine], pipe: Pipe, least: Least, at_least: float, value: Value
    ) -> None:
        """With each family of recomputations, by what ranks share of time and memory."""
        base, costs, job = pipeline.base, pipeline.costs, pipeline.job
        room, counts = self._room[id(base)].room_bytes, self.space.count_families(base, job)
        hopeless = False
        for at, family in enumerate(self.space.families(base, job)):
            seconds = None if hopeless else self._known.balance(costs, family).seconds(pipe, least, room, at_least)
            if seconds is None:
                self.counts.infeasible += len(costs.under) * len(engines) * counts[at]
                hopeless = hopeless or family.kinds[-1] == FULL  # what keeps least has no room
                continue
            self._push(max(value, self._value(job, seconds)), partial(self._cut, pipeline, engines, at))

    def _cut(self, pipeline: Pipeline, engines: Sequence[Engine], at: int, value: Value) -> None:
        """A pipeline, cut over its ranks evenly and in the best way. at: its family of recomputations."""
        base, costs, job = pipeline.base, pipeline.costs, pipeline.job
        cuts = self._known.cuts(pipeline)
        counted = self.space.count_cuts(base, job, cuts)[at] - self.space.count_families(base, job)[at]
        self.counts.space += len(costs.under) * len(engines) * counted
        each = kept_of(costs.grid, job, engines).each
        for one in cuts:
            stages = stages_of(base.job, base.graph, one.layout.pp, 1, one.layout.pp_split)
            family = self.space.families(base, one)[at]
            times = computing_s(costs, stages, family.fastest)
            under = tuple([replace(one, engine=each) for each in engines])
            cut = Cut(base=base, costs=costs, job=one, engines=under, each=each, family=family)
            seconds = any_chunks_s(costs, one, times, self.space.most_chunks(base, one))
            self._push(max(value, self._value(one, seconds)), partial(self._chunked, cut))

    def _chunked(self, cut: Cut, value: Value) -> None:
        """Every number of model chunks a rank, with what must be recomputed at the least, if any engine and loss make it fit."""
        base, times = cut.base, len(cut.costs.under) * len(cut.engines)
        for job in self.space.chunked(base, cut.job):
            counted = times * self.space.count_family(base, job, cut.family)
            stages = stages_of(base.job, base.graph, job.layout.pp, job.layout.vpp, job.layout.pp_split)
            if not all(map(all_chunks, stages)):
                self.counts.infeasible += counted
                continue
            one = replace(cut, job=job, family=of_chunks(cut.family, stages))
            strategies = times * len(one.family.kinds)
            self.counts.space += strategies - counted
            seconds = 0.0 if self.exhaustive else with_room_s(one, stages, self._room[id(base)])
            if seconds is None:
                self.counts.infeasible += strategies
                continue
            self._push(max(value, self._value(job, seconds)), partial(self._sharded, one, stages))

    def _sharded(self, cut: Cut, stages: tuple[Stage, ...], value: Value) -> None:
        """Every loss and every way to divide states over replicas; of sets of modules each that no other beats."""
        for under in cut.costs.under:
            one = under_loss(cut, under)
            modular = cut.family.modular and not self.exhaustive
            families = [Family(kinds=(some.recompute,)) for some in under.selections] if modular else [cut.family]
            for family in families:
                self._each_engine(replace(one, family=family), stages, value)

    def _each_engine(self, cut: Cut, stages: tuple[Stage, ...], value: Value) -> None:
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
            again = layers_again(cut, stages, each_element(job), in_flight, self._room[id(cut.base)])
            if again is None:
                self.counts.infeasible += len(family.kinds)
                continue
            # all ranks recompute as many as the one that must recompute most
            recompute = family.at_least(max(again))
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
        may_fit = partial(self._room[id(strategy.base)].may_fit, strategy.costs, strategy.stages, strategy.job)
        return bisect_left(kinds, True, key=may_fit)

    def _bound(self, strategy: Strategy, at: int) -> Value:
        recompute = strategy.family.kinds[at]
        return self._at_best(strategy, stage_times(strategy.costs, strategy.stages, [strategy.job], recompute))

    def _at_best(self, strategy: Strategy, times: list[StageTime]) -> Value:
        """No strategy is faster than its ranks' ``times`` and what comes after them."""
        job, costs = strategy.job, strategy.costs
        ends = ends_bound_s(times, job.data.grad_accum, costs.send_s(job))
        ends[0] = max(ends[0], steps_s(costs, job, times))
        slowest = max(
            end + outside_bound_s(job, Held(costs, stage), time)
            for end, stage, time in zip(ends, strategy.stages, times, strict=True)
            if stage.first_of_kind
        )
        return self._value(job, slowest)

    def _timed(self, strategy: Strategy, at: int, value: Value) -> None:
        """The exact time; of one that has no room under another loss not even that."""
        job = replace(strategy.job, recompute=strategy.family.kinds[at])
        rest = 1 if self.exhaustive else len(strategy.family.kinds) - at
        refused = refusal(job)
        if refused is not None:
            self._refuse(job, refused, rest)
            return
        if self._exact.is_known(strategy, job):
            self._left_out(strategy, at, exact=False)
            return
        try:
            time = step_time(job, strategy.base.graph_for(job))
        except (Unsupported, Infeasible) as error:
            self._refuse(job, error, rest)
            return
        self.counts.evaluated += 1
        timed = Timed(strategy=strategy, at=at, job=job, time=time)
        self._push(self._value(job, time.step_s), partial(self._answered, timed))

    def _answered(self, timed: Timed, value: Value) -> Found | None:
        """The exact memory."""
        job, strategy = timed.job, timed.strategy
        try:
            too_large = self._exact.too_large(strategy, job)
            answer = None if too_large else estimate(job, strategy.base.graph_for(job))
        except (Unsupported, Infeasible) as error:
            self.counts.evaluated -= 1
            self._refuse(job, error, 1 if self.exhaustive else len(strategy.family.kinds) - timed.at)
            return None
        if answer is not None and self._exact.fits(answer):
            return Found(job=job, time=timed.time, estimate=answer, value=value)
        if self.missed is None:
            needed_bytes = self._exact.needed_bytes(answer) if answer is not None else too_large
            on_host = answer is not None and answer.is_over_host
            self.missed = Missed(job=job, value=value, needed_bytes=needed_bytes, on_host=on_host)
        self.counts.evaluated -= 1
        self._left_out(strategy, timed.at, exact=answer is not None)
        return None

    def _left_out(self, strategy: Strategy, at: int, *, exact: bool) -> None:
        """A strategy that does not fit: what recomputes more than it may. exact: by its estimate."""
        self._failed += 1
        self.counts.infeasible += 1
        count = len(strategy.family.kinds)
        if at + 1 < count and not self.exhaustive:
            look = partial(self._recomputed_more, strategy, at + 1, count, exact)
            self._push(self._bound(strategy, at + 1), look)

    def _recomputed_more(self, strategy: Strategy, low: int, high: int, exact: bool, value: Value) -> None:
        """The first recomputation from ``low`` on that its account leaves, recomputing more layers being taken not to raise it. ``high`` is
        left, where there is such a one. The smallest is asked for first, then by halving, once a look: most are never looked at again.
        exact: with the allocator simulated, which costs more than to time one that does not fit after all."""
        kinds = strategy.family.kinds
        if low == high:
            self._push(value, partial(self._timed, strategy, low))
            return
        at = high - 1 if high == len(kinds) else (low + high) // 2
        job = replace(strategy.job, recompute=kinds[at])
        if self._exact.has_room(strategy, job, simulated=exact):
            high = at
        else:
            self.counts.infeasible += at + 1 - low
            low = at + 1
        if low < len(kinds):
            self._push(self._bound(strategy, low), partial(self._recomputed_more, strategy, low, high, exact))

    def _refuse(self, job: Job, error: UllageError | Callable[[], UllageError], strategies: int) -> None:
        if job.engine.name not in self.reasons:
            self.reasons[job.engine.name] = error() if callable(error) else error
        self.counts.infeasible += strategies
        self.counts.refused += strategies

    def _grids(self, base: Base) -> list[Grids]:
        found, strategies = grids_of(self.space, base, self._refuse)
        self.counts.space += strategies
        return found
