"""What a schedule costs: micro-batches in flight, idle time, and its shortest form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from ullage.schedule.base import Action, Kind

_IN_FLIGHT = {"F": 1, "B": -1, "I": 0, "W": -1}


def in_flight(actions: Sequence[Action]) -> int:
    """The most forwards at one time whose backward, the weights' half too, has not run; one is one chunk of one micro-batch."""
    live = most = 0
    for action in actions:
        live += _IN_FLIGHT[action.kind]
        most = max(most, live)
    return most


def chunks_in_flight(actions: Sequence[Action], chunks: int) -> tuple[int, ...]:
    """Of each of a rank's chunks the same, when most of all together are in flight, for the first time."""
    live = [0] * chunks
    found = tuple(live)
    for action in actions:
        live[action.chunk] += _IN_FLIGHT[action.kind]
        if sum(live) > sum(found):
            found = tuple(live)
    return found


Cost = Callable[[int, Action], float]
"""Seconds that a rank takes for one of its actions."""


def equal_stages(*, forward_s: float = 1.0, backward_s: float = 2.0) -> Cost:
    seconds = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    return lambda rank, action: seconds[action.kind]


EQUAL = equal_stages()


Stages = Sequence[Sequence[int]]
"""Of each rank the stages that its chunks are, in model order."""


def finish_times(
    ranks: Sequence[Sequence[Action]], cost: Cost = EQUAL, *, send_s: float = 0.0, stages: Stages | None = None
) -> tuple[tuple[float, ...], ...]:
    """When each rank ends each of its actions. send_s: from one stage to the next, where another rank holds it.

    A forward waits for the stage before, a backward for the stage behind, and an action for the rank's previous one.
    stages: without it, chunk c of rank r is stage c x ranks + r.
    """
    count = len(ranks)
    chunks = 1 + max(action.chunk for actions in ranks for action in actions)
    placed = stages or [[chunk * count + rank for chunk in range(chunks)] for rank in range(count)]
    last_stage = max(stage for mine in placed for stage in mine)
    micro_batches = 1 + max(action.micro_batch for actions in ranks for action in actions)
    # when each stage has ended each micro-batch, and where; None: not yet
    forwards: list[list[tuple[float, int] | None]] = [[None] * micro_batches for _ in range(last_stage + 1)]
    backwards: list[list[tuple[float, int] | None]] = [[None] * micro_batches for _ in range(last_stage + 1)]
    ends: list[list[float]] = [[] for _ in ranks]
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            mine = ends[rank]
            now = mine[-1] if mine else 0.0
            for action in islice(actions, len(mine), None):
                stage, micro_batch = placed[rank][action.chunk], action.micro_batch
                ready: tuple[float, int] | None
                if action.kind == "F":
                    done = forwards[stage]
                    ready = (0.0, rank) if stage == 0 else forwards[stage - 1][micro_batch]
                elif action.kind == "W":
                    ready = backwards[stage][micro_batch]
                else:
                    done = backwards[stage]
                    ready = forwards[stage][micro_batch]
                    if ready is not None and stage != last_stage:
                        ready = backwards[stage + 1][micro_batch]
                if ready is None:
                    break
                from_s = ready[0] if ready[1] == rank else ready[0] + send_s
                now = (now if now > from_s else from_s) + cost(rank, action)
                mine.append(now)
                if action.kind != "W":
                    done[micro_batch] = (now, rank)
                progress = True
    assert all(len(mine) == len(actions) for mine, actions in zip(ends, ranks, strict=True)), "the schedule deadlocks"
    return tuple(tuple(mine) for mine in ends)


def bubble_fraction(
    ranks: Sequence[Sequence[Action]],
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    stages: Stages | None = None,
) -> float:
    """The share of all ranks' time in which they wait, where every stage takes the same time and sending takes none."""
    cost = equal_stages(forward_s=forward_s, backward_s=backward_s)
    span = max(mine[-1] for mine in finish_times(ranks, cost, stages=stages))
    busy = sum(cost(rank, action) for rank, actions in enumerate(ranks) for action in actions)
    return 1.0 - busy / (span * len(ranks))


def compact(actions: Sequence[Action]) -> tuple[tuple[int, tuple[Action, ...]], ...]:
    """The actions as (repeats, pattern) runs; repeats differ from their pattern in the micro-batch alone.

    Each run is one that saves much from where the last ended, the shortest pattern among equals. 1F1B becomes its warm-up,
    its steady state and its tail, however many micro-batches it has.
    """
    words = [(action.kind, action.chunk) for action in actions]
    runs: list[tuple[int, tuple[Action, ...]]] = []
    start = 0
    while start < len(words):
        length, repeats = _best_run(words, start)
        runs.append((repeats, tuple(actions[start : start + length])))
        start += length * repeats
    return tuple(runs)


def _best_run(words: Sequence[tuple[Kind, int]], start: int) -> tuple[int, int]:
    best, most_saved = (1, 1), 0
    length = 1
    while 2 * length <= len(words) - start:
        end = start + length
        while end < len(words) and words[end] == words[end - length]:
            end += 1
        repeats = (end - start) // length
        if (repeats - 1) * length > most_saved:
            best, most_saved = (length, repeats), (repeats - 1) * length
        # A longer pattern that fits twice into a run of this one ends where it ends, or this one would have gone on.
        length = max(length + 1, end - start - length + 1)
    return best
