"""What looks at one pipeline after another ask for again: engines that send alike, balances of time and memory, the best cuts, and what has
no room."""

from __future__ import annotations

from itertools import groupby

from ullage.engines.estimate import Estimate, estimate
from ullage.errors import Infeasible, Unsupported
from ullage.frozen import replace
from ullage.job.job import Engine, Job
from ullage.planner.balance import Balance, alike
from ullage.planner.exact import first_too_large
from ullage.planner.shapes import LeastCosts, ShapeCosts
from ullage.planner.space import Family, Space, Split
from ullage.planner.splits import best_split
from ullage.planner.strategies import Pipeline, Strategy
from ullage.planner.wanted import Base


class Known:
    """Of one search. Costs and pipelines are known by identity, and kept for it."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._engines: dict[object, list[tuple[Engine, ...]]] = {}
        self._balances: dict[object, Balance] = {}
        self._cuts: dict[int, tuple[Pipeline, list[Job]]] = {}

    def engines(self, base: Base, job: Job) -> list[tuple[Engine, ...]]:
        """A pipeline's engines, those together that send the same."""
        layout = job.layout
        key = id(base), layout.dp * layout.cp, layout.pp > 1, job.data.grad_accum > 1
        if key not in self._engines:
            every = sorted(self._space.engines(base, job), key=alike)
            self._engines[key] = [tuple([one.engine for one in some]) for _, some in groupby(every, alike)]
        return self._engines[key]

    def balance(self, costs: ShapeCosts | LeastCosts, family: Family) -> Balance:
        key = id(costs), family.kinds[0], family.kinds[-1]
        if key not in self._balances:
            self._balances[key] = Balance(costs, family)
        return self._balances[key]

    def cuts(self, pipeline: Pipeline) -> list[Job]:
        """A pipeline cut over its ranks evenly and in the best way."""
        key = id(pipeline)
        if key not in self._cuts:
            best = self._best_split(pipeline.costs, pipeline.job)
            self._cuts[key] = pipeline, self._space.cuts(pipeline.base, pipeline.job, best)
        return self._cuts[key][1]

    def _best_split(self, costs: ShapeCosts, job: Job) -> Split:
        """None where it is the even one."""
        if not self._space.has_best_cut(job):
            return None
        split = best_split(costs.layers_s, job.layout.pp, first_s=costs.first_s, last_s=costs.last_s)
        return split if len(set(split)) > 1 else None


class ExactRoom:
    """What the exact account has no room for. Ranks that do not have the head do not know of the loss: what they have no room for under
    one, they have none for under another."""

    def __init__(self, *, tight: bool = False) -> None:
        """tight: whether what may fit has room."""
        self._tight = tight
        self._needed_bytes: dict[Job, int] = {}  # of jobs whatever their loss

    def is_known(self, strategy: Strategy, job: Job) -> bool:
        """Whether it is too large for a rank that does not know of its loss."""
        return _whatever_loss(strategy, job) in self._needed_bytes

    def fits(self, answer: Estimate) -> bool:
        return answer.verdict == "fits" or (self._tight and answer.verdict == "tight")

    def needed_bytes(self, answer: Estimate) -> int:
        """The end of its interval that decides, or what a node needs that has too little of its own."""
        if answer.is_over_host:
            return answer.host_bytes
        return answer.peak.low_bytes if self._tight else answer.peak.high_bytes

    def has_room(self, strategy: Strategy, job: Job, *, simulated: bool) -> bool:
        """simulated: with the allocator, which costs more than to time one that does not fit after all."""
        try:
            if self.too_large(strategy, job):
                return False
            return not simulated or self.fits(estimate(job, strategy.base.graph_for(job)))
        except (Unsupported, Infeasible):  # what it recomputes does not go with the rest of the job
            return False

    def too_large(self, strategy: Strategy, job: Job) -> int:
        """The estimate, high (of tight strategies low), of a rank whose allocated bytes are too many, before the allocator is simulated; 0
        where there is none. Of ranks with the same chunks the first stands for all."""
        whatever_loss = _whatever_loss(strategy, job)
        if whatever_loss not in self._needed_bytes:
            stages = [stage.index for stage in strategy.stages if stage.first_of_kind]
            found = first_too_large(job, strategy.base.graph_for(job), stages, tight=self._tight)
            if found is None:
                return 0
            rank, needed_bytes = found
            if rank.last:
                return needed_bytes
            self._needed_bytes[whatever_loss] = needed_bytes
        return self._needed_bytes[whatever_loss]


def _whatever_loss(strategy: Strategy, job: Job) -> Job:
    return replace(job, loss=strategy.base.job.loss)
