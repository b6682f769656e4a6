"""What a loop that is not ours held on one rank, beside what was predicted of it. No torch here: a report reads it."""

from __future__ import annotations

from typing import Literal

from ullage.frozen import frozen


@frozen
class Held:
    """Bytes of one rank. reserved, device: None where only what is allocated is known."""

    allocated_bytes: int
    reserved_bytes: int | None = None
    device_bytes: int | None = None


@frozen
class Watched:
    """actual: highest of the steps watched (None: nothing was measured); of storages that were followed, of the last whole step.

    predicted: of this rank (None: unmodelled says why). moment: of the predicted peak. steps: optimizer steps. notes: what makes the two
    incomparable.
    """

    device: str
    rank: int
    how: Literal["allocator", "storages", "nothing"]
    actual: Held | None
    predicted: Held | None
    moment: str
    steps: int
    unmodelled: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Predicted over actual allocated bytes, less 1."""
        if self.actual is None or self.predicted is None or not self.actual.allocated_bytes:
            return None
        return self.predicted.allocated_bytes / self.actual.allocated_bytes - 1
