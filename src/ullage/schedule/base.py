"""The words of a schedule: an action, and the pipeline that it is an action in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ullage.errors import InvalidInput
from ullage.frozen import frozen

Kind = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class Action:
    """The whole forward or backward of one micro-batch through one of the rank's model chunks."""

    kind: Kind
    chunk: int
    micro_batch: int


@frozen
class Shape:
    """A pipeline of ``stages`` ranks with ``chunks`` model chunks each, and the micro-batches of one optimizer step.

    Chunk ``c`` of rank ``r`` is stage ``c * stages + r`` of the model.
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
