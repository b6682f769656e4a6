"""The rank that a technique is told of, in the estimate's own values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ullage.engines.estimate import Estimate, estimate
from ullage.engines.reach import refuse_what_is_not_read
from ullage.engines.registry import account, ranks_of
from ullage.errors import InvalidInput, Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.memory.ledger import Line, ledger
from ullage.memory.program import locate_peak
from ullage.memory.rank import Rank
from ullage.model.graph import Graph
from ullage.timing.stage import Stage
from ullage.timing.step import stages
from ullage.timing.transfers import Transfer, transfers


@dataclass(frozen=True)
class OneRank:
    """A job and one of its pipeline stages; everything else is computed when a technique asks for it.

    index None: the stage of the estimate's peak.
    """

    job: Job
    index: int | None = None

    def __post_init__(self) -> None:
        if self.job.stack == "traced":
            raise Unsupported(
                "has no named matrices, layers or collectives to tell of",
                key="a traced module",
                remedy="ullage trace shows its allocations",
            )
        refuse_what_is_not_read(self.job)
        if self.index is not None and not 0 <= self.index < self.job.layout.pp:
            last = self.job.layout.pp - 1
            raise InvalidInput(
                "is no pipeline stage", key="--rank", value=self.index, allowed=f"0 to {last}" if last else "0"
            )

    @cached_property
    def graph(self) -> Graph:
        return graph_of(self.job)

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.job)

    @cached_property
    def stage(self) -> int:
        if self.index is not None or self.job.layout.pp == 1:
            return self.index or 0
        return next(one.stage for one in self.estimate.ranks if self.estimate.peak.rank in one.ranks)

    @cached_property
    def rank(self) -> Rank:
        return ranks_of(self.job, self.graph)[self.stage]

    @cached_property
    def ledger(self) -> tuple[Line, ...]:
        """The account at this rank's own peak."""
        return ledger(locate_peak(account(self.job, self.graph, self.rank).program))

    @cached_property
    def timed(self) -> Stage:
        return stages(self.job, self.graph)[self.stage]

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        return transfers(self.timed)
