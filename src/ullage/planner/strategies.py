"""What a search looks at, from a shape over pipeline ranks to a strategy with its exact time, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ullage.engines.estimate import Estimate
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.planner.shapes import ShapeCosts
from ullage.planner.space import Family
from ullage.planner.stages import Stage
from ullage.planner.states import EachElement
from ullage.planner.wanted import Base
from ullage.timing.step import StepTime

Value = tuple[float, ...]
"""What a goal makes of a strategy's seconds; the least is best."""

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
    """The most promising strategy that does not fit: what memory costs. needed_bytes: of its device, by its high estimate; of tight ones
    by the low one. on_host: of a node, whose own memory is what is short."""

    job: Job
    value: Value
    needed_bytes: int
    on_host: bool = False


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
class Pipeline:
    """A shape over ``pp`` ranks. job: with its replicas and micro-batches. even_s: where its ranks share the blocks' work evenly."""

    base: Base
    costs: ShapeCosts
    job: Job
    even_s: float


@frozen
class Cut:
    """A pipeline, cut by rank; vpp yet open. engines: it under some stages; each: what any of them keeps at the least."""

    base: Base
    costs: ShapeCosts
    job: Job
    engines: tuple[Job, ...]
    each: EachElement
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


def same(job: Job) -> object:
    """Strategies that a person would call the same: of their micro-batches, cuts and recomputation only the best counts."""
    layout = job.layout
    return (job.engine.name, layout.tp, layout.cp, layout.pp, layout.ep, job.engine.zero_stage)
