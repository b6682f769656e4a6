"""What crosses blocks beside the stream: which block frees it.

A tensor that one block makes and others read (a skip connection, an encoder's output, a mask) goes with the last of them that holds it:
the first block of the model, since backwards run from its end, whose backward needs it. A block needs what it saved or, where it is
checkpointed, all that it read. Where no backward does, it goes with its last reader's forward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import lru_cache

from ullage.frozen import frozen
from ullage.kernels import stacks
from ullage.kernels.step import Context, Crossing, Slot, gradient_of
from ullage.model.graph import Block


@frozen
class Crossings:
    """Of one block. leaves: names of what it lends and autograd keeps for it. read: names that its steps read. saved: of these and of what
    it makes, what its own backward needs."""

    borrows: tuple[Crossing, ...] = ()
    lends: tuple[Crossing, ...] = ()
    sends: tuple[Crossing, ...] = ()
    receives: tuple[Crossing, ...] = ()
    sums: tuple[Crossing, ...] = ()
    leaves: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()

    @property
    def any(self) -> bool:
        return bool(self.borrows or self.lends or self.sends or self.receives or self.sums)


@lru_cache(maxsize=4096)
def crossings(block: Block, context: Context) -> Crossings:
    steps = stacks.lower(block, context)
    return Crossings(
        borrows=tuple(one for step in steps for one in step.borrows),
        lends=tuple(one for step in steps for one in step.lends),
        sends=tuple(one for step in steps for one in step.sends),
        receives=tuple(one for step in steps for one in step.receives),
        sums=tuple(one for step in steps for one in step.sums),
        leaves=frozenset(one.name for step in steps if step.leaf for one in step.lends),
        read=frozenset(name for step in steps for name in step.reads),
        saved=frozenset(name for step in steps for name in step.saves),
    )


def handed(
    blocks: Sequence[tuple[Crossings, bool]], leaving: Collection[Slot] = (), *, received: bool = False
) -> list[frozenset[str]]:
    """For each block of a chunk, in order, the names that it hands away or takes over. The flag: whether it is checkpointed.

    leaving: slots of what the chunk hands on: that is the chunk's to free. received: whether a chunk is in front of it, to which it
    sends the gradients that nobody takes here: they are the chunk's to free too.
    """
    found: list[set[str]] = [set() for _ in blocks]
    outputs = {(at, one.name) for at, one in made_for_later(blocks, leaving)}
    for maker, users in tensors(blocks):
        keeps = maker in outputs or maker[1] in blocks[maker[0]][0].leaves
        owner = maker if keeps else _owner(blocks, maker, users)
        if owner is not None:
            found[maker[0]].add(maker[1])
            found[owner[0]].add(owner[1])
    for at, name in outputs:
        found[at].add(name)
    for at, name in _first_gradients(blocks):
        found[at].add(gradient_of(name))
    claimed, unclaimed = _sent(blocks)
    for at, one in (*claimed, *(unclaimed if received else ())):
        found[at].add(one.name)
    return [frozenset(names) for names in found]


def _first_gradients(blocks: Sequence[tuple[Crossings, bool]]) -> list[Place]:
    """Of every gradient that several blocks add up, the one whose backward runs first."""
    latest = {one.slot: (at, one.name) for at, (found, _) in enumerate(blocks) for one in found.sums}
    return list(latest.values())


def made_for_later(blocks: Sequence[tuple[Crossings, bool]], leaving: Collection[Slot]) -> list[tuple[int, Crossing]]:
    """What these blocks made of what leaves them: (block, tensor), the last of each slot."""
    latest = {one.slot: (at, one) for at, (found, _) in enumerate(blocks) for one in found.lends if one.slot in leaving}
    return list(latest.values())


def sent_before(blocks: Sequence[tuple[Crossings, bool]]) -> tuple[Crossing, ...]:
    """Gradients that no block of these takes."""
    return tuple(one for _, one in _sent(blocks)[1])


def _sent(
    blocks: Sequence[tuple[Crossings, bool]],
) -> tuple[list[tuple[int, Crossing]], list[tuple[int, Crossing]]]:
    """(block, gradient) of both ends of every gradient that is sent and taken here, and of what is sent to a chunk before."""
    claimed: list[tuple[int, Crossing]] = []
    waiting: dict[tuple[Slot, int], tuple[int, Crossing]] = {}
    for at in reversed(range(len(blocks))):
        for one in blocks[at][0].receives:
            if (one.slot, one.bytes) in waiting:
                claimed += [waiting.pop((one.slot, one.bytes)), (at, one)]
        waiting |= {(one.slot, one.bytes): (at, one) for one in blocks[at][0].sends}
    return claimed, list(waiting.values())


Place = tuple[int, str]
"""A block of several, and a name in it."""


def tensors(blocks: Sequence[tuple[Crossings, bool]]) -> list[tuple[Place, list[Place]]]:
    """(block and name of the maker, those of the readers) of every tensor that is made and read in these blocks."""
    latest: dict[Slot, Place] = {}
    users: dict[Place, list[Place]] = defaultdict(list)
    for at, (found, _) in enumerate(blocks):
        for one in found.borrows:
            if one.slot in latest:
                users[latest[one.slot]].append((at, one.name))
        for one in found.lends:
            latest[one.slot] = (at, one.name)
    return list(users.items())


def _owner(blocks: Sequence[tuple[Crossings, bool]], maker: Place, users: list[Place]) -> Place | None:
    """Who frees it; None: the maker itself."""
    if _needs(blocks[maker[0]], maker[1], makes=True):
        return None
    return next((user for user in users if _needs(blocks[user[0]], user[1])), users[-1])


def _needs(block: tuple[Crossings, bool], name: str, *, makes: bool = False) -> bool:
    """Whether a block's backward needs a tensor that was there in the forward; what a checkpointed one makes it makes again, and where it
    saves nothing it is not run again."""
    found, recomputes = block
    if recomputes:
        return name in found.read and bool(found.saved) and not makes
    return name in found.saved
