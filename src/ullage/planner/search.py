"""The best strategies by exact time and exact memory, found by looking first where a bound promises most.

Every strategy waits in a queue by a lower bound of its value. The first one is taken and looked at more closely: its pipeline cut and
its least recomputation, then its exact time, at last its exact memory; each look can only raise its value. What comes out of the queue
known to the end is the best of all: whatever is left has a bound that is no better. Nothing is dropped that is not proven worse.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count

from ullage.engines.base import context_of
from ullage.engines.estimate import Estimate, estimate, rank_peak
from ullage.engines.interval import LEAST_ABOVE
from ullage.engines.pipeline import takes_turns
from ullage.engines.registry import ranks_of
from ullage.errors import Infeasible, UllageError, Unsupported
from ullage.frozen import frozen
from ullage.job.checks import violations
from ullage.job.job import Data, Engine, Job, Layout, Recompute
from ullage.kernels import stacks
from ullage.memory.overhead import outside_allocator
from ullage.model.graph import Graph
from ullage.planner import space
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
from ullage.planner.copies import batched, changed, pipelined, with_micro_batch
from ullage.planner.costs import NONE, GridCosts, ShapeCosts
from ullage.planner.space import Base, Wanted
from ullage.planner.splits import best_split
from ullage.planner.stages import Stage, flights, stages_of
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
class Family:
    """Recomputations of one kind, each slower and smaller than the one before."""

    kinds: tuple[Recompute, ...]


@frozen
class Cut:
    """A shape over ``pp`` ranks, cut by rank. job: with its replicas and micro-batches; vpp yet open. engines: it under some stages."""

    base: Base
    costs: ShapeCosts
    job: Job
    engines: tuple[Job, ...]
    families: tuple[Family, ...]


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
        self._counted: dict[object, dict[int, int]] = {}
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
        for job in self._shapes(base, grid.job):
            try:
                known.append((self._shared(job, grid.dense_s(job.data.micro_batch)), job))
            except (Unsupported, Infeasible) as error:
                self._refuse(job, error, self._count(base, job))
        if known:
            jobs = [job for _, job in known]
            self._push(min(value for value, _ in known), partial(self._unlowered, base, grid, jobs))

    def _unlowered(self, base: Base, grid: GridCosts, jobs: Sequence[Job], value: Value) -> None:
        """The shapes of a grid, each by the value where all ranks share what is known of its work before it is lowered."""
        for job in jobs:
            try:
                seconds = grid.least_s(job.data.micro_batch)
            except (Unsupported, Infeasible) as error:
                self._refuse(job, error, self._count(base, job))
                continue
            self._push(max(value, self._shared(job, seconds)), partial(self._costed, base, grid, job))

    def _costed(self, base: Base, grid: GridCosts, job: Job, value: Value) -> None:
        """A shape by the value where all ranks share its blocks' work evenly and never wait."""
        try:
            costs = ShapeCosts(grid, job)
        except (Unsupported, Infeasible) as error:
            self._refuse(job, error, self._count(base, job))
            return
        self._push(max(value, self._shared(job, costs.whole_s)), partial(self._piped, base, costs))

    def _shared(self, job: Job, whole_s: float) -> Value:
        """Of a micro-batch's seconds where all ranks that hold different layers or sequences share them."""
        ranks = job.cluster.gpus // (job.layout.tp * job.layout.cp)
        return self.goal(job, whole_s / (ranks * job.data.micro_batch))

    def _piped(self, base: Base, costs: ShapeCosts, value: Value) -> None:
        """A shape's pipelines, each by the value where its ranks share the blocks' work evenly, whatever its cut."""
        for job in self._pipelines(base, costs.job):
            if _leaves_experts_over(job.layout):
                broken = next(one for one in violations(job) if one.code != "warning")
                self._refuse(
                    job,
                    broken.error(),
                    sum(self._count_with(base, job, each) for each in self._possible_splits(base, job.layout.pp)),
                )
                continue
            seconds = evenly_bound_s(costs, job.layout.pp, job.data.grad_accum, costs.send_s(job))
            self._push(max(value, self._value(job, seconds)), partial(self._cut, base, costs, job))

    def _cut(self, base: Base, costs: ShapeCosts, job: Job, value: Value) -> None:
        """A pipeline, cut over its ranks evenly and in the best way."""
        for split in self._splits(base, costs, job):
            one = job
            if split:
                one = changed(job, layout=pipelined(job.layout, dp=job.layout.dp, pp=job.layout.pp, split=split))
            stages = stages_of(base.job, base.graph, one.layout.pp, 1, split)
            times = computing_s(costs, stages, NONE)
            engines = tuple(changed(one, engine=engine) for engine in self._engines(base, one.layout))
            self._push_cut(Cut(base=base, costs=costs, job=one, engines=engines, families=()), stages, times)

    def _push_cut(self, cut: Cut, stages: tuple[Stage, ...], times: list[StageTime]) -> None:
        """A cut by its computing; with recomputation layer by layer, and with other kinds."""
        seconds = _any_chunks_s(cut, times)
        for families in filter(None, self._families(cut.base, cut.job.layout)):
            one = replace(cut, families=families)
            self._push(self._value(cut.job, seconds), partial(self._held, one, stages, times))

    def _held(self, cut: Cut, stages: tuple[Stage, ...], times: list[StageTime], value: Value) -> None:
        """A cut with what it recomputes at least, if any way to divide states makes it fit; apart those that gather parameters around
        blocks, with what they send."""
        base, costs, job, families = cut.base, cut.costs, cut.job, cut.families
        if self.exhaustive:
            self._push(value, partial(self._chunked, cut))
            return
        for sharded in (False, True):
            one = replace(cut, engines=tuple(each for each in cut.engines if is_sharded(each) == sharded))
            if not one.engines:
                continue
            again = self._layers_again(base, costs, stages, one.engines, _under_1f1b(job), families[0].kinds[0])
            if again is None:
                self.counts.infeasible += self._count_of(one)
                continue
            longer = [
                longer_by(time, again_s(costs, stage, layers))
                for time, stage, layers in zip(times, stages, again, strict=True)
            ]
            wired = stage_times(costs, stages, one.engines, NONE)
            slower = [a if a.both_s > b.both_s else b for a, b in zip(longer, wired, strict=True)]
            self._push(self._value(job, _any_chunks_s(one, slower)), partial(self._chunked, one))

    def _layers_again(
        self,
        base: Base,
        costs: ShapeCosts,
        stages: tuple[Stage, ...],
        engines: Sequence[Job],
        in_flight: Sequence[int],
        recompute: Recompute,
    ) -> list[int] | None:
        """Of each rank the fewest layers of a chunk that it recomputes, whatever the engine; None where nothing makes it fit.

        recompute: the first of its family; where that is none, layers may be recomputed one by one.
        """
        room = self._room[id(base)]
        found = []
        for stage in stages:
            layers: int | None = 0  # of equal ranks the later ones have less in flight
            if stage.first_of_kind:
                held = Held(costs, stage)
                kept, end = (min(each) for each in zip(*(room.states_bytes(held, job) for job in engines), strict=True))
                layers = None
                if end <= room.room_bytes:
                    layers = room.layers_again(costs, stage, in_flight[stage.index], kept, recompute)
            if layers is None:
                return None
            found.append(layers)
        return found

    def _chunked(self, cut: Cut, value: Value) -> None:
        """Every number of model chunks a rank, every way to divide states over replicas, every family of recomputation."""
        base, costs = cut.base, cut.costs
        for vpp in self._chunks(base, cut.job):
            layout = cut.job.layout
            layout = pipelined(layout, dp=layout.dp, pp=layout.pp, vpp=vpp, split=layout.pp_split)
            job = changed(cut.job, layout=layout)
            stages = stages_of(base.job, base.graph, layout.pp, vpp, layout.pp_split)
            engines = len(cut.engines)
            counted = engines * _recomputations(
                cut.families, -(-max(layout.pp_split or (base.graph.layers // layout.pp,)) // vpp)
            )
            if not all(map(_all_chunks, stages)):
                self.counts.infeasible += counted
                continue
            self.counts.space += engines * _recomputations(cut.families, _largest_chunk(stages)) - counted
            seconds = _steps_s(costs, job, computing_s(costs, stages, NONE))
            self._push(max(value, self._value(job, seconds)), partial(self._sharded, cut, job, stages))

    def _sharded(self, cut: Cut, job: Job, stages: tuple[Stage, ...], value: Value) -> None:
        """Every way to divide states over replicas."""
        base, costs = cut.base, cut.costs
        families = _of_chunks(cut.families, stages)
        in_flight = flights(job)
        known: dict[Recompute, list[StageTime]] = {}
        for with_engine in cut.engines:
            one = changed(job, engine=with_engine.engine)
            strategies = [
                Strategy(base=base, costs=costs, job=one, stages=stages, family=family) for family in families
            ]
            if self.exhaustive:
                for strategy in strategies:
                    for at in range(len(strategy.family.kinds)):
                        self._push(self._bound(strategy, at), partial(self._timed, strategy, at))
                continue
            again = self._layers_again(base, costs, stages, [one], in_flight, families[0].kinds[0])
            if again is None:
                self.counts.infeasible += sum(len(family.kinds) for family in families)
                continue
            for strategy in strategies:  # all ranks recompute as many as the one that must recompute most
                least = min(max(again), len(strategy.family.kinds) - 1)
                recompute = strategy.family.kinds[least]
                if is_sharded(one):
                    times = stage_times(costs, stages, [one], recompute)
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
        low, high = 0, len(strategy.family.kinds)
        while low < high:
            middle = (low + high) // 2
            if self._may_fit(strategy, strategy.family.kinds[middle]):
                high = middle
            else:
                low = middle + 1
        return low

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
        job = changed(strategy.job, recompute=strategy.family.kinds[at])
        rest = 1 if self.exhaustive else len(strategy.family.kinds) - at
        broken = next((one for one in violations(job) if one.code != "warning"), None)
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
        fits = timed.at + 1 if rest == 1 else self._first_that_fits(strategy, timed.at + 1)
        self.counts.infeasible += fits - timed.at
        if fits < len(strategy.family.kinds) and not self.exhaustive:
            self._push(self._bound(strategy, fits), partial(self._timed, strategy, fits))
        return None

    def _first_that_fits(self, strategy: Strategy, low: int) -> int:
        """By the exact account, which recomputing more layers is taken not to raise: halving, the smallest first."""
        high = len(strategy.family.kinds)
        middle = high - 1
        while low < high:
            if self._fits(strategy, middle):
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return high

    def _fits(self, strategy: Strategy, at: int) -> bool:
        job, graph = changed(strategy.job, recompute=strategy.family.kinds[at]), strategy.base.graph
        return not too_large(job, graph) and estimate(job, graph).verdict == "fits"

    def _refuse(self, job: Job, error: UllageError, strategies: int) -> None:
        self.reasons.setdefault(job.engine.name, error)
        self.counts.infeasible += strategies
        self.counts.refused += strategies

    # -- the space

    def _grids(self, base: Base) -> Iterator[GridCosts]:
        """Degrees that divide blocks, with each loss."""
        want, gpus = self.want, base.job.cluster.gpus
        beside: dict[object, GridCosts] = {}
        for tp in space.tensor_parallel(want, base, gpus):
            if gpus % tp:
                continue
            for cp in space.degrees(want, "cp", gpus // tp):
                for etp in space.degrees(want, "etp", tp) if _experts(base) else (1,):
                    for ep in space.degrees(want, "ep", _experts(base) or 1):
                        for sp in space.sequence_parallel(want, tp):
                            layout = Layout(
                                dp=gpus // (tp * cp) or 1, tp=tp, cp=cp, cp_kind=base.job.layout.cp_kind, sp=sp,
                                ep=ep, etp=etp,
                            )  # fmt: skip
                            yield from self._with_losses(base, changed(base.job, layout=layout), beside)

    def _with_losses(self, base: Base, job: Job, beside: dict[object, GridCosts]) -> Iterator[GridCosts]:
        """beside: a grid of each tensor, sequence and context parallelism and loss, whatever its expert parallelism."""
        layout = job.layout
        broken = next((one for one in violations(job) if one.code != "warning"), None)
        like: GridCosts | None = None
        for loss in space.losses(self.want, base):
            one = changed(job, loss=loss)
            strategies = sum(self._sizes(base, one).values())
            self.counts.space += strategies
            if broken is not None:  # whatever the pipeline
                self._refuse(job, broken.error(), strategies)
            elif strategies:
                key = layout.tp, layout.cp, layout.sp, loss
                like = GridCosts(one, base.graph, like, beside.get(key))
                beside.setdefault(key, like)
                yield like

    def _shapes(self, base: Base, job: Job) -> list[Job]:
        """A grid with each micro-batch that divides the batch."""
        return [with_micro_batch(job, size) for size in self._sizes(base, job)]

    def _sizes(self, base: Base, job: Job) -> dict[int, int]:
        """A grid's micro-batches, each with its strategies: the same of all that leave as many ranks to pipelines and replicas."""
        layout = job.layout
        key = (id(base), layout.tp * layout.cp, layout.cp)
        if key not in self._counted:
            want = self.want
            sizes = (want.micro_batch,) if want.micro_batch else space.micro_batches(want.global_batch)
            counted = {size: self._count_shape(base, with_micro_batch(job, size)) for size in sizes}
            self._counted[key] = {size: strategies for size, strategies in counted.items() if strategies}
        return self._counted[key]

    def _pipelines(self, base: Base, job: Job) -> Iterator[Job]:
        """Pipelines of a shape, with their replicas and micro-batches."""
        ranks = job.cluster.gpus // (job.layout.tp * job.layout.cp)
        for pp in space.degrees(self.want, "pp", ranks):
            if ranks % pp or pp > base.graph.layers or self.want.fixed("dp") not in (None, ranks // pp):
                continue
            data = self._data(job.data, ranks // pp)
            if data is not None:
                yield changed(job, layout=pipelined(job.layout, dp=ranks // pp, pp=pp), data=data)

    def _splits(self, base: Base, costs: ShapeCosts, job: Job) -> Iterator[tuple[int, ...] | None]:
        """Layers of each rank: the job's own, or the even cut where there is one (None), and the best one where it is another."""
        if "layout.pp_split" in self.want.written:
            yield self.want.layout.pp_split
            return
        layout = job.layout
        if base.graph.layers % layout.pp == 0:
            yield None
        if layout.pp > 1:
            split = best_split(costs.layers_s, layout.pp, first_s=costs.first_s, last_s=costs.last_s)
            if len(set(split)) > 1:
                self.counts.space += self._count_with(base, job, split)
                yield split
            self.counts.space -= self._count_with(base, job, _stand_in(base, layout.pp))

    def _chunks(self, base: Base, job: Job) -> Iterator[int]:
        """Model chunks per rank: as many as divide an inner rank's layers, so that no rank waits for another's longer chunk."""
        want, pp, split = self.want, job.layout.pp, job.layout.pp_split
        schedule = want.fixed("schedule")
        inner = max(split[1:-1] or split) if split else base.graph.layers // pp
        fewest = min(split) if split else inner
        for vpp in space.degrees(want, "vpp", inner):
            interleaved = vpp > 1
            if interleaved and want.smallest and not want.fixed("vpp"):
                continue
            if interleaved and (pp == 1 or job.data.grad_accum % pp or schedule not in (None, "interleaved-1f1b")):
                continue
            if (not interleaved and schedule == "interleaved-1f1b") or vpp > fewest:
                continue
            yield vpp

    def _data(self, data: Data, dp: int) -> Data | None:
        want = self.want
        if want.global_batch is None:
            return batched(data, grad_accum=want.grad_accum or 1)
        if want.global_batch % (dp * data.micro_batch):
            return None
        accum = want.global_batch // (dp * data.micro_batch)
        return batched(data, grad_accum=accum) if want.grad_accum in (None, accum) else None

    def _engines(self, base: Base, layout: Layout) -> Iterator[Engine]:
        """Stages and shard groups."""
        group = layout.dp * layout.cp
        for stage in space.zero_stages(self.want, base, group):
            for shard_group in space.shard_groups(self.want, base, group, stage):
                yield replace(base.job.engine, zero_stage=stage, shard_group=shard_group)

    def _families(self, base: Base, layout: Layout) -> tuple[tuple[Family, ...], tuple[Family, ...]]:
        """Recomputation layer by layer, and of other kinds: the stack's own, or what the job says."""
        own = space.recomputes(self.want, base)
        if own is not None:
            return (), (Family(kinds=(own,)),)
        layers = -(-base.graph.layers // (layout.pp * layout.vpp))
        return _layer_by_layer(layers), _SELECTIVE if _has_selective(base.job, base.graph) else ()

    def _count(self, base: Base, job: Job) -> int:
        """Strategies of a shape."""
        return self._sizes(base, job)[job.data.micro_batch]

    def _count_shape(self, base: Base, job: Job) -> int:
        return sum(
            self._count_with(base, one, split)
            for one in self._pipelines(base, job)
            for split in self._possible_splits(base, one.layout.pp)
        )

    def _possible_splits(self, base: Base, pp: int) -> list[tuple[int, ...] | None]:
        """The even cut where there is one, and one that stands for the best."""
        if "layout.pp_split" in self.want.written:
            return [self.want.layout.pp_split]
        even: list[tuple[int, ...] | None] = [None] if base.graph.layers % pp == 0 else []
        return even if pp == 1 else [*even, _stand_in(base, pp)]

    def _count_with(self, base: Base, job: Job, split: tuple[int, ...] | None) -> int:
        """Strategies of a cut."""
        job = changed(job, layout=pipelined(job.layout, dp=job.layout.dp, pp=job.layout.pp, split=split))
        free, own = self._families(base, job.layout)
        engines = sum(1 for _ in self._engines(base, job.layout))
        return engines * self._recomputed(base, job, (*free, *own))

    def _recomputed(self, base: Base, job: Job, families: tuple[Family, ...]) -> int:
        """Recomputations of a cut, for each number of chunks."""
        largest = max(job.layout.pp_split or (base.graph.layers // job.layout.pp,))
        return sum(_recomputations(families, -(-largest // vpp)) for vpp in self._chunks(base, job))

    def _count_of(self, cut: Cut) -> int:
        """Strategies of a cut with its own engines and families."""
        return len(cut.engines) * self._recomputed(cut.base, cut.job, cut.families)


def _steps_s(costs: ShapeCosts, job: Job, times: Sequence[StageTime]) -> float:
    """The bound of a schedule whose chunks are known."""
    return step_bound_s(times, job.data.grad_accum, costs.send_s(job), grouped=takes_turns(job))


def _any_chunks_s(cut: Cut, times: Sequence[StageTime]) -> float:
    job = cut.job
    return any_chunks_bound_s(cut.costs, times, job.data.grad_accum, cut.costs.send_s(job))


def _under_1f1b(job: Job) -> list[int]:
    """Micro-batches in flight on each rank: however a rank's layers are cut into chunks, no less is in flight."""
    return [min(job.layout.pp - rank, job.data.grad_accum) for rank in range(job.layout.pp)]


def _leaves_experts_over(layout: Layout) -> bool:
    """Whether experts' ranks do not divide those of a pipeline stage."""
    return (layout.dp * layout.cp * layout.tp) % (layout.ep * layout.etp) != 0


def _stand_in(base: Base, pp: int) -> tuple[int, ...]:
    """A cut that is counted where the best one is not known."""
    return (-(-base.graph.layers // pp),) * pp


@lru_cache(maxsize=4096)
def _layer_by_layer(layers: int) -> tuple[Family, ...]:
    some = tuple(Recompute(kind="layers", layers=number) for number in range(1, layers))
    return (Family(kinds=(NONE, *some, Recompute(kind="full"))),)


_SELECTIVE = (Family(kinds=(Recompute(kind="selective"),)),)


def _of_chunks(families: tuple[Family, ...], stages: tuple[Stage, ...]) -> tuple[Family, ...]:
    """Of layers one by one, as many as the largest chunk has."""
    return families if families[0].kinds[0] is not NONE else _layer_by_layer(_largest_chunk(stages))


def _largest_chunk(stages: tuple[Stage, ...]) -> int:
    """Layers of the longest chunk of any rank."""
    return max(sum(count for _, count, layer in part if layer) for one in stages for part in one.chunks)


def _recomputations(families: tuple[Family, ...], layers: int) -> int:
    """How many there are in these families where the longest chunk has ``layers``."""
    return sum(layers + 1 if family.kinds[0] is NONE else len(family.kinds) for family in families)


def _all_chunks(stage: Stage) -> bool:
    """Whether each chunk of a rank has a layer."""
    return all(any(layer for _, _, layer in part) for part in stage.chunks)


@lru_cache(maxsize=64)
def _has_selective(job: Job, graph: Graph) -> bool:
    """Whether the stack has a selective recomputation of its own that runs something again."""
    block = next(run.block for run in graph.runs if run.block.role == "layer")
    try:
        return bool(stacks.segments(block, context_of(job, graph), Recompute(kind="selective")))
    except Unsupported:
        return False


def _experts(base: Base) -> int:
    size = base.graph.sizes.get("experts", 0)
    return size if isinstance(size, int) else 0


def same(job: Job) -> object:
    """Strategies that a person would call the same: of their micro-batches, cuts and recomputation only the best counts."""
    layout = job.layout
    return (job.engine.name, layout.tp, layout.cp, layout.pp, layout.ep, job.engine.zero_stage)


def too_large(job: Job, graph: Graph) -> int:
    """The high estimate of the first rank that cannot fit, without simulating the allocator; 0 where all may."""
    device = job.cluster.device
    for rank in ranks_of(job, graph):
        peak, account = rank_peak(job, graph, rank)
        outside = outside_allocator(job.cluster, account.groups, eager=account.eager)
        high = int(peak * (1 + LEAST_ABOVE)) + sum(one.high_bytes for one in outside)
        if high >= device.capacity_bytes:
            return high
    return 0
