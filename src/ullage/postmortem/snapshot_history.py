"""A snapshot's recorded history, walked back from its end: what was held when most was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ullage.memory.program import round_up
from ullage.postmortem.snapshot_frames import Frame, category_of, words


class Held(NamedTuple):
    """A block that a tensor holds, or that waits for another stream. bytes: of the block; requested_bytes: of the tensor."""

    address: int
    bytes: int
    requested_bytes: int
    pool: str
    category: str
    what: str


class Recorded(NamedTuple):
    """An allocation (``alive``) or the completion of a free. frames: the allocation's call stack as the file has it, if it does."""

    alive: bool
    address: int
    bytes: int
    frames: object


def at_peak(
    held: Sequence[Held], history: Sequence[Recorded], stack: Callable[[object], tuple[Frame, ...]]
) -> tuple[Held, ...] | None:
    """What was held at the highest point of a history that ends with ``held``, the largest first; None without history.

    The history is a ring: what was allocated before it began is known from ``held`` or from its free. stack: reads the frames
    of the few that were live then.
    """
    if not history:
        return None
    live = most = sum(one.bytes for one in held)
    back_to = len(history)
    for number in range(len(history) - 1, -1, -1):
        change = history[number]
        live += -round_up(change.bytes) if change.alive else round_up(change.bytes)
        if live > most:
            most, back_to = live, number
    there: dict[int, Held | Recorded] = {one.address: one for one in held}
    for change in reversed(history[back_to:]):
        if change.alive:
            there.pop(change.address, None)
        else:
            there[change.address] = change
    found = [one if isinstance(one, Held) else _held(one, stack(one.frames)) for one in there.values()]
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.address)))


def _held(change: Recorded, stack: tuple[Frame, ...]) -> Held:
    return Held(change.address, round_up(change.bytes), change.bytes, "", category_of(stack), words(stack))
