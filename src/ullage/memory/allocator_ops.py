"""A program compiled for the allocator's replay: allocations and frees with all that they need to know looked up before.

An allocation that a stretch of the program itself frees gets a slot. What outlives the stretch, or comes from outside, goes over
a stack of its item, which is kept for each micro-batch: a free takes the youngest, as in ``program.written_out``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from ullage.memory.allocator_blocks import MIN_BLOCK_BYTES, SMALL_BYTES, round_bytes
from ullage.memory.program import Change, Item, Node, Repeat, Sequence

# A block is (size, address) as one integer: it compares faster than a tuple, and as best fit looks for it.
ADDRESS_BITS = 64
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
_Kind = tuple[int, int, list[int], int]  # size, request, free, least: as in Op


class Op(NamedTuple):
    """An allocation (size > 0), a free (size 0), or an allocation that the next change frees (size < 0).

    where: the slot that holds the block, or below 0 the stack. request: the size as a block with address 0. free: the free
    blocks of its stream and size class. least: bytes that are worth splitting off.
    """

    where: int
    size: int
    request: int
    free: list[int]
    least: int


class Part(NamedTuple):
    """``ops``, with ``slots`` for what they both allocate and free; or, where ``inner`` stands, these parts ``times`` over."""

    ops: tuple[Op, ...]
    slots: int
    inner: tuple[Part, ...] = ()
    times: int = 1


class Compiler:
    """Parts of programs as ops. ``pools``: the free blocks of each stream and size class, which the ops refer to.

    expandable: what is free in a new pool of small or large blocks whose segment expands; None: segments are plain.
    """

    def __init__(self, expandable: Callable[[bool], list[int]] | None = None) -> None:
        self._expandable = expandable
        self.pools: dict[tuple[int, bool], list[int]] = {}
        self._parts: dict[Node, tuple[Part, ...]] = {}
        self._kinds: dict[Item, list[_Kind]] = {}
        self._stacks: dict[tuple[Item, int], int] = {}

    def free_blocks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(free) for free in self.pools.values())

    def empty(self) -> None:
        """No block is free any more: what was compiled may be played from the start."""
        for free in self.pools.values():
            free.clear()

    def parts(self, node: Node) -> tuple[Part, ...]:
        found = self._parts.get(node)
        if found is None:
            found = self._parts[node] = self._compile(node)
        return found

    def _compile(self, node: Node) -> tuple[Part, ...]:
        parts: list[Part] = []
        run: list[tuple[Item, bool]] = []
        for one in _changes(node):
            if isinstance(one, Repeat):
                parts += self._run(run)
                run = []
                parts.append(Part((), 0, self.parts(one.child), one.times))
            else:
                run.append(one)
        return (*parts, *self._run(run))

    def _run(self, changes: list[tuple[Item, bool]]) -> list[Part]:
        """Allocations that the run itself frees get slots; the free takes the youngest, as in ``program.written_out``."""
        if not changes:
            return []
        begun: defaultdict[Item, list[int]] = defaultdict(list)
        freed_at: dict[int, int] = {}
        for index, (item, alive) in enumerate(changes):
            if alive:
                begun[item].append(index)
            elif begun[item]:
                freed_at[begun[item].pop()] = index
        ops: list[Op] = []
        slot_of: dict[int, int] = {}  # by the index of the free
        slots = 0
        for index, (item, alive) in enumerate(changes):
            kinds = self._kinds_of(item)
            if alive and index in freed_at:
                slot_of[freed_at[index]] = slots
                for size, request, free, least in kinds:
                    ops.append(Op(slots, size, request, free, least))
                    slots += 1
            elif index in slot_of:
                for where, (_, request, free, least) in enumerate(kinds, slot_of[index]):
                    ops.append(Op(where, 0, request, free, least))
            else:
                for piece, (size, request, free, least) in enumerate(kinds):
                    where = self._stacks.setdefault((item, piece), -1 - len(self._stacks))
                    ops.append(Op(where, size if alive else 0, request, free, least))
        return [Part(_paired(ops), slots)]

    def _kinds_of(self, item: Item) -> list[_Kind]:
        """Each tensor of an item; one of no bytes holds nothing, as in torch."""
        kinds = self._kinds.get(item)
        if kinds is None:
            sizes = [round_bytes(n_bytes) for n_bytes in item.pieces or (item.bytes,) if n_bytes]
            kinds = self._kinds[item] = [self._kind(size, item.stream) for size in sizes]
        return kinds

    def _kind(self, size: int, stream: int) -> _Kind:
        is_small = size <= SMALL_BYTES
        free = self.pools.get((stream, is_small))
        if free is None:
            free = self.pools[stream, is_small] = self._expandable(is_small) if self._expandable is not None else []
        splits_freely = is_small or self._expandable is not None
        return size, size << ADDRESS_BITS, free, MIN_BLOCK_BYTES if splits_freely else SMALL_BYTES + 1


def _changes(node: Node) -> list[tuple[Item, bool] | Repeat]:
    """What a part does, in order; a child that repeats stands for itself, so that it is compiled once."""
    found: list[tuple[Item, bool] | Repeat] = []

    def look(part: Node) -> None:
        if isinstance(part, Change):
            if part.count in (1, -1):
                found.append((part.item, part.count > 0))
            else:
                found.extend([(part.item, part.count > 0)] * abs(part.count))
        elif isinstance(part, Sequence):
            for child in part.children:
                look(child)
        else:
            assert isinstance(part, Repeat)
            if part.times > 1:
                found.append(part)
            elif part.times:
                look(part.child)

    look(node)
    return found


def _paired(ops: list[Op]) -> tuple[Op, ...]:
    """Each allocation that the very next op frees becomes one op with it."""
    paired: list[Op] = []
    for op in ops:
        last = paired[-1] if paired else op
        if not op.size and op.where >= 0 and last.where == op.where and last.size > 0:
            paired[-1] = last._replace(size=-last.size)
        else:
            paired.append(op)
    return tuple(paired)
