"""What crosses blocks beside the stream: which block frees it.

A tensor that one block makes and others read (a skip connection, an encoder's output, a mask) goes with the last of them that holds it:
the first block of the model, since backwards run from its end, whose backward needs it. A block needs what it saved or, where it is
checkpointed, all that it read. Where no backward does, it goes with its last reader's forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from ullage.frozen import frozen
from ullage.kernels import stacks
from ullage.kernels.step import Context, Crossing, Step
from ullage.model.graph import Block


@frozen
class Crossings:
    """Of one block. saved: names that its own steps save. cached: that wait for the end of the forward."""

    borrows: tuple[Crossing, ...] = ()
    lends: tuple[Crossing, ...] = ()
    sends: tuple[Crossing, ...] = ()
    receives: tuple[Crossing, ...] = ()
    saved: frozenset[str] = frozenset()
    cached: frozenset[str] = frozenset()

    @property
    def any(self) -> bool:
        return bool(self.borrows or self.lends or self.sends or self.receives)


@lru_cache(maxsize=4096)
def crossings(block: Block, context: Context) -> Crossings:
    steps = stacks.lower(block, context)
    return Crossings(
        borrows=tuple(one for step in steps for one in step.borrows),
        lends=tuple(one for step in steps for one in step.lends),
        sends=tuple(one for step in steps for one in step.sends),
        receives=tuple(one for step in steps for one in step.receives),
        saved=_names(steps, "saves"),
        cached=_names(steps, "caches"),
    )


def _names(steps: Sequence[Step], what: str) -> frozenset[str]:
    return frozenset(name for step in steps for name in getattr(step, what))


def handed(blocks: Sequence[tuple[Crossings, bool]]) -> list[frozenset[str]]:
    """For each block of a chunk, in order, the names that it hands away or takes over. The flag: whether it is checkpointed."""
    found: list[set[str]] = [set() for _ in blocks]
    for maker, users in _tensors(blocks):
        owner = _owner(blocks, maker, users)
        if owner is not None:
            found[maker[0]].add(maker[1])
            found[owner[0]].add(owner[1])
    sent: dict[tuple[int, int], tuple[int, str]] = {}
    for at in reversed(range(len(blocks))):
        for one in blocks[at][0].receives:
            if (one.slot, one.bytes) in sent:
                sender, name = sent.pop((one.slot, one.bytes))
                found[sender].add(name)
                found[at].add(one.name)
        sent |= {(one.slot, one.bytes): (at, one.name) for one in blocks[at][0].sends}
    return [frozenset(names) for names in found]


_Place = tuple[int, str]


def _tensors(blocks: Sequence[tuple[Crossings, bool]]) -> list[tuple[_Place, list[_Place]]]:
    """(block and name of the maker, those of the readers) of every tensor that is made and read in these blocks."""
    latest: dict[int, _Place] = {}
    users: dict[_Place, list[_Place]] = defaultdict(list)
    for at, (found, _) in enumerate(blocks):
        for one in found.borrows:
            if one.slot in latest:
                users[latest[one.slot]].append((at, one.name))
        for one in found.lends:
            latest[one.slot] = (at, one.name)
    return list(users.items())


def _owner(blocks: Sequence[tuple[Crossings, bool]], maker: _Place, users: list[_Place]) -> _Place | None:
    """Who frees it; None: the maker itself."""
    of_maker, recomputes = blocks[maker[0]]
    if maker[1] in of_maker.saved and not recomputes:
        return None
    needs = [(at, name) for at, name in users if blocks[at][1] or name in blocks[at][0].saved]
    if needs:
        return needs[0]
    return None if maker[1] in of_maker.cached else users[-1]
