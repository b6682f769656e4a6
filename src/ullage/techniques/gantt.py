"""A step of a pipeline over time: when each rank runs which micro-batch through which of its chunks."""

from __future__ import annotations

from typing import NamedTuple

from ullage.frozen import frozen
from ullage.schedule.base import Kind
from ullage.timing.stage import Stage
from ullage.timing.step import Order


class Slot(NamedTuple):
    """One pass, from ``start_s`` to ``end_s``."""

    kind: Kind
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


@frozen
class Gantt:
    """ranks: the slots of each pipeline rank by time. after_s: when the passes of each end what it does once a step (reductions,
    the optimizer) follows, until then."""

    ranks: tuple[tuple[Slot, ...], ...]
    after_s: tuple[float, ...]
    chunks: int = 1

    @property
    def halved(self) -> bool:
        """Whether gradients of weights are made in passes of their own."""
        return any(slot.kind == "W" for mine in self.ranks for slot in mine)

    @property
    def end_s(self) -> float:
        return max(self.after_s)

    @property
    def span_s(self) -> float:
        """From the first forward's start to the last backward's end."""
        return max(mine[-1].end_s for mine in self.ranks)

    def busy_s(self, rank: int) -> float:
        return sum(slot.end_s - slot.start_s for slot in self.ranks[rank])

    def idle_share(self, rank: int) -> float:
        """The share of the passes' span in which a rank waits for its neighbours."""
        return 1.0 - self.busy_s(rank) / self.span_s


def gantt(order: Order, stages: tuple[Stage, ...]) -> Gantt:
    """The actions with the times that the step's seconds are made of."""
    ranks = []
    for stage, actions, ends in zip(stages, order.actions, order.ends_s, strict=True):
        ranks.append(
            tuple(
                Slot(
                    action.kind, action.chunk, action.micro_batch, end - stage.seconds(action, stage.micro_batches), end
                )
                for action, end in zip(actions, ends, strict=True)
            )
        )
    after = tuple(mine[-1].end_s + stage.outside.total_s for mine, stage in zip(ranks, stages, strict=True))
    return Gantt(ranks=tuple(ranks), after_s=after, chunks=len(stages[0].rank.chunks))
