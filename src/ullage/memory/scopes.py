"""Micro-batches under way in a program: whose allocations a pass frees.

A pass is named by its kind and its model chunk. "F" opens a micro-batch; "B" ends the oldest that has had no backward. "I" and "W" are the
halves of one: "W" ends the oldest that has had its "I".
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

S = TypeVar("S")


class OpenScopes(Generic[S]):
    """make: what is kept of a micro-batch in one chunk."""

    __slots__ = ("_halved", "_make", "_queues")

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._queues: defaultdict[int, deque[S]] = defaultdict(deque)
        self._halved: defaultdict[int, int] = defaultdict(int)  # of each chunk's oldest, how many wait for their "W"

    def __iter__(self) -> Iterator[S]:
        return (scope for queue in self._queues.values() for scope in queue)

    def enter(self, kind: str, chunk: int) -> S:
        queue = self._queues[chunk]
        if kind == "F":
            queue.append(self._make())
            return queue[-1]
        return queue[self._at(kind, chunk)]

    def leave(self, kind: str, chunk: int) -> S | None:
        """What was kept of the micro-batch that ends here, if one does."""
        if kind == "F":
            return None
        if kind == "I":
            self._halved[chunk] += 1
            return None
        at, queue = self._at(kind, chunk), self._queues[chunk]
        closed = queue[at]
        del queue[at]
        if kind == "W":
            self._halved[chunk] -= 1
        return closed

    def state(self, frozen: Callable[[S], object]) -> object:
        """All of it, to be compared."""
        return tuple(
            (chunk, self._halved[chunk], tuple(map(frozen, queue))) for chunk, queue in sorted(self._queues.items())
        )

    def _at(self, kind: str, chunk: int) -> int:
        return 0 if kind == "W" else self._halved[chunk]
