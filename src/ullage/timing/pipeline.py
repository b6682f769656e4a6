"""When each rank of a pipeline does what: the schedule's own actions, with each stage's own seconds and the sends between them."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.frozen import frozen
from ullage.schedule.base import Action


@frozen
class StageTime:
    """Of one chunk of one rank, one micro-batch."""

    forward_s: float
    backward_s: float


def makespan(
    ranks: Sequence[Sequence[Action]], stages: Sequence[Sequence[StageTime]], *, send_s: float = 0.0
) -> tuple[float, ...]:
    """When each rank is through with its last action. stages: [rank][chunk]. send_s: from one stage to the next."""
    count = len(ranks)
    last = count * (1 + max(action.chunk for actions in ranks for action in actions)) - 1
    done: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * count
    at = [0] * count
    waiting = list(range(count))
    while waiting:
        still = []
        moved = False
        for rank in waiting:
            actions = ranks[rank]
            while at[rank] < len(actions):
                action = actions[at[rank]]
                stage = action.chunk * count + rank
                ready = _ready(action.kind, stage, action.micro_batch, last, done, send_s)
                if ready is None:
                    break
                time = stages[rank][action.chunk]
                end = max(ready, clocks[rank]) + (time.forward_s if action.kind == "F" else time.backward_s)
                done[action.kind, stage, action.micro_batch] = clocks[rank] = end
                at[rank] += 1
                moved = True
            if at[rank] < len(actions):
                still.append(rank)
        assert moved or not still, "the schedule deadlocks"
        waiting = still
    return tuple(clocks)


def _ready(
    kind: str, stage: int, micro_batch: int, last: int, done: dict[tuple[str, int, int], float], send_s: float
) -> float | None:
    """When the input of an action is there; None: not yet."""
    if kind == "F":
        if stage == 0:
            return 0.0
        sent = done.get(("F", stage - 1, micro_batch))
    elif stage == last:
        return done.get(("F", stage, micro_batch))
    else:
        if ("F", stage, micro_batch) not in done:
            return None
        sent = done.get(("B", stage + 1, micro_batch))
    return None if sent is None else sent + send_s
