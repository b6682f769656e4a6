"""V-Half and V-Min: one micro-batch's passes over a V, placed so that they repeat every six units of time, hold little and never collide.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3 and appendix. The closer a stage's forward and
backward are, the less is in flight: a half and a third of 1F1B's, for some bubble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from ullage.schedule.base import Action, Kind, Shape

UNITS = 6
"""Two chunks' forwards and halves of backwards, a unit of time each."""

_PASSES: tuple[tuple[Kind, int], ...] = (("F", 0), ("F", 1), ("I", 1), ("I", 0))
"""In the order in which a micro-batch comes by a rank."""

Starts = tuple[int, int, int, int]


def v_half(shape: Shape, rank: int) -> Iterator[Action]:
    return _repeated(shape, rank, _half)


def v_min(shape: Shape, rank: int) -> Iterator[Action]:
    return _repeated(shape, rank, _min)


def _half(stages: int, rank: int) -> Starts:
    shift = 0 if stages % 2 else 3
    return 2 * rank, 3 * stages - rank - 2, 3 * stages + shift + 2 * rank - 1, 6 * stages + shift - rank - 2


def _min(stages: int, rank: int) -> Starts:
    shift = 0 if stages % 3 else 2
    return rank, 2 * stages - rank - 1, 2 * stages + shift + rank, 4 * stages + shift - rank - 1


def _repeated(shape: Shape, rank: int, starts: Callable[[int, int], Starts]) -> Iterator[Action]:
    """Weights' gradients take the first free unit after their input's."""
    shape.must_have(2, "a schedule of the V's building blocks")
    at = {
        start + UNITS * number: Action(kind, chunk, number)
        for (kind, chunk), start in zip(_PASSES, starts(shape.stages, rank), strict=True)
        for number in range(shape.micro_batches)
    }
    assert len(at) == len(_PASSES) * shape.micro_batches, "two passes fall on one unit of time"
    waiting: deque[Action] = deque()
    for unit in range(max(at) + 1):
        action = at.get(unit)
        if action is not None:
            yield action
            if action.kind == "I":
                waiting.append(Action("W", action.chunk, action.micro_batch))
        elif waiting:
            yield waiting.popleft()
    yield from waiting
