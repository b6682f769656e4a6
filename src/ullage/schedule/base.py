"""The words of a schedule: an action, and the pipeline that it is an action in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, cast

from ullage.errors import InvalidInput
from ullage.frozen import frozen

Kind = Literal["F", "B", "I", "W"]
"""A forward; a whole backward, or its two halves: the gradient of the input, which the stage before waits for, and those of the weights."""


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through one of the rank's model chunks."""

    kind: Kind
    chunk: int
    micro_batch: int


@frozen
class Shape:
    """A pipeline of ``stages`` ranks with ``chunks`` model chunks each, and the micro-batches of one optimizer step.

    placement.py tells which stage of the model a rank's chunk is.
    ``group_size``: micro-batches that a rank runs through one chunk before it turns to the next (interleaved only).
    """

    stages: int
    micro_batches: int
    chunks: int = 1
    group_size: int | None = None

    def __post_init__(self) -> None:
        for key, value in (
            ("layout.pp", self.stages),
            ("micro-batches", self.micro_batches),
            ("layout.vpp", self.chunks),
            ("group size", 1 if self.group_size is None else self.group_size),
        ):
            if value < 1:
                raise InvalidInput("must be at least 1", key=key, value=value)

    def must_have(self, chunks: int, schedule: str) -> None:
        """Raises InvalidInput where a rank has another number of chunks than the schedule is made for."""
        if self.chunks != chunks:
            raise InvalidInput(
                f"{schedule} has {chunks} model chunk{'s' * (chunks > 1)} per rank", key="layout.vpp", value=self.chunks
            )


Word = tuple[Kind, int]
"""An action before it is known of which micro-batch: its kind and chunk."""


def passes(text: str, times: int = 1) -> list[Word]:
    """``F1 I1`` as words, ``times`` times over: the forward of chunk 1, the first half of its backward."""
    return [(cast(Kind, word[0]), int(word[1:])) for word in text.split()] * times


def numbered(words: Iterable[Word]) -> Iterator[Action]:
    """Each chunk takes micro-batches in order, its forwards, its backwards and its weights' gradients alike."""
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    waiting: dict[int, deque[int]] = {}
    for kind, chunk in words:
        if kind == "W":
            yield Action(kind, chunk, waiting[chunk].popleft())
            continue
        counts = forwards if kind == "F" else backwards
        number = counts.get(chunk, 0)
        counts[chunk] = number + 1
        if kind == "I":
            waiting.setdefault(chunk, deque()).append(number)
        yield Action(kind, chunk, number)
