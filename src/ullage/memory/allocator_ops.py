"""A program compiled for the allocator's replay: allocations and frees with all that they need to know looked up before.

Within a part of the program each block has a slot. What the part frees and did not allocate comes off a stack of its item before the part
begins, what it leaves goes onto one at its end. Stacks are kept for each micro-batch: a free takes the youngest, as in
``program.written_out``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import NamedTuple

from ullage.memory.allocator_blocks import MIN_BLOCK_BYTES, SMALL_BYTES, round_bytes
from ullage.memory.program import Change, Item, Node, Repeat, Sequence

# A block is (size, address) as one integer: it compares faster than a tuple, and as best fit looks for it.
ADDRESS_BITS = 64
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
_Kind = tuple[int, int, list[int], int]  # size, request, free, least: as in Op
OWN_PART = 64
"""Changes of a moment that is compiled by itself: an engine's layers share their nodes, and are many."""
_WORTH = 4
"""Ops that take longer to play than it takes to see that they need not be played."""


Op = tuple[int, int, int, list[int], int]
"""slot, size, request, free, least: an allocation (size > 0), a free (size 0), or an allocation that the next change frees (size < 0).

slot: what holds the block. request: the size as a block with address 0. free: the free blocks of its stream and size class.
least: bytes that are worth splitting off.
"""


Need = tuple[list[int], int, int, int]
"""free, together, largest, others: the free blocks of a pool, and as blocks with address 0 the sizes of some allocations in a row: all of
them, the largest, and the others.

None of them needs a new segment where a free block holds all of them, or where the largest free block holds the largest of them and
the next one the others. Best fit leaves it so: what it carves out of one of the two, for others or for the largest, leaves the other
whole, and it carves the larger one only where the two have changed places. A rest too small to be split off is smaller than any request.
"""


Stacked = tuple[int, int, int]
"""The stack of an item, and the slots of one allocation of it, from and to: a slot for each of its tensors."""


class Stretch(NamedTuple):
    """Ops one after another. needs: of those that allocate some in a row and free just these, what they need of each pool; free blocks
    are afterwards what they were, where it is there. rise_bytes: the most by which they rise."""

    ops: tuple[Op, ...]
    needs: tuple[Need, ...] = ()
    rise_bytes: int = 0


class Part(NamedTuple):
    """``stretches`` on ``slots`` blocks; or, where ``inner`` stands, these parts ``times`` over.

    takes, keeps: of what was there before, in the order of the frees, and of what is left, in that of the allocations.
    """

    stretches: tuple[Stretch, ...]
    slots: int
    takes: tuple[Stacked, ...] = ()
    keeps: tuple[Stacked, ...] = ()
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
        self._kind_of: dict[tuple[int, int], _Kind] = {}  # by bytes and stream
        self._stacks: dict[Item, int] = {}

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
            if isinstance(one, Node):
                parts += self._run(run)
                run = []
                parts += [self._repeated(one)] if isinstance(one, Repeat) else self.parts(one)
            else:
                run.append(one)
        return (*parts, *self._run(run))

    def _repeated(self, node: Repeat) -> Part:
        return Part((), 0, inner=self.parts(node.child), times=node.times)

    def _run(self, changes: list[tuple[Item, bool]]) -> list[Part]:
        """A free takes the youngest that the run has allocated, else what was there before: so that all of that is taken first."""
        if not changes:
            return []
        begun: defaultdict[Item, list[int]] = defaultdict(list)  # the first slots of what is allocated and not freed
        ops: list[Op] = []
        takes: list[Stacked] = []
        slots = 0
        for item, alive in changes:
            kinds = self._kinds.get(item) or self._kinds_of(item)
            if not kinds:
                continue
            if not alive and begun[item]:
                first = begun[item].pop()
                if len(kinds) == 1 and ops[-1][0] == first:  # allocated a moment ago
                    size, request, free, least = kinds[0]
                    ops[-1] = first, -size, request, free, least
                    continue
            else:
                first = slots
                slots += len(kinds)
                if alive:
                    begun[item].append(first)
                else:
                    takes.append(self._stacked(item, first))
            for slot, (size, request, free, least) in enumerate(kinds, first):
                ops.append((slot, size if alive else 0, request, free, least))
        keeps = [self._stacked(item, first) for item, firsts in begun.items() for first in firsts]
        keeps.sort(key=itemgetter(1))
        # what a segment that expands has mapped depends on all that is taken from it
        stretches = tuple(_stretches(ops)) if self._expandable is None else (Stretch(tuple(ops)),)
        return [Part(stretches, slots, tuple(takes), tuple(keeps))]

    def _stacked(self, item: Item, first: int) -> Stacked:
        return self._stacks.setdefault(item, len(self._stacks)), first, first + len(self._kinds[item])

    def _kinds_of(self, item: Item) -> list[_Kind]:
        """Each tensor of an item; one of no bytes holds nothing, as in torch."""
        found = self._kinds[item] = [
            self._kind_of.get((n_bytes, item.stream)) or self._kind(n_bytes, item.stream)
            for n_bytes in item.pieces or (item.bytes,)
            if n_bytes
        ]
        return found

    def _kind(self, n_bytes: int, stream: int) -> _Kind:
        size = round_bytes(n_bytes)
        is_small = size <= SMALL_BYTES
        free = self.pools.get((stream, is_small))
        if free is None:
            free = self.pools[stream, is_small] = self._expandable(is_small) if self._expandable is not None else []
        splits_freely = is_small or self._expandable is not None
        kind = size, size << ADDRESS_BITS, free, MIN_BLOCK_BYTES if splits_freely else SMALL_BYTES + 1
        self._kind_of[n_bytes, stream] = kind
        return kind


def _changes(node: Node) -> list[tuple[Item, bool] | Repeat | Sequence]:
    """What a part does, in order; a child that repeats or is a long moment stands for itself, so that it is compiled once."""
    found: list[tuple[Item, bool] | Repeat | Sequence] = []

    def look(part: Node) -> None:
        if isinstance(part, Change):
            if part.count in (1, -1):
                found.append((part.item, part.count > 0))
            else:
                found.extend([(part.item, part.count > 0)] * abs(part.count))
        elif isinstance(part, Sequence):
            for child in part.children:
                if isinstance(child, Sequence) and child.moment and child.changes >= OWN_PART:
                    found.append(child)
                else:
                    look(child)
        else:
            assert isinstance(part, Repeat)
            if part.times > 1:
                found.append(part)
            elif part.times:
                look(part.child)

    look(node)
    return found


def _stretches(ops: list[Op]) -> Iterator[Stretch]:
    """Ops cut around those that allocate some in a row and then free just these."""
    begins = {op[0]: at for at, op in enumerate(ops) if op[1] > 0}
    frees = [at for at, op in enumerate(ops) if not op[1]]
    done = index = 0
    while index < len(frees):
        first = lowest = begin = end = at = frees[index]
        while index < len(frees) and frees[index] == at:
            begun = begins.get(ops[at][0], -1)
            if begun < lowest:
                lowest = begun
            index += 1
            at += 1
            if at - first == first - lowest and lowest >= 0:  # as many frees as ops before them
                begin, end = lowest, at
        if end - begin >= _WORTH:
            if done < begin:
                yield Stretch(tuple(ops[done:begin]))
            yield _bracket(tuple(ops[begin:end]), first - begin)
            done = end
    if done < len(ops):
        yield Stretch(tuple(ops[done:]))


def _bracket(ops: tuple[Op, ...], count: int) -> Stretch:
    """``count`` allocations and their frees."""
    pools = {id(free): free for _, _, _, free, _ in ops[:count]}
    needs = []
    for pool, free in pools.items():
        requests = [op[2] for op in ops[:count] if id(op[3]) == pool]
        together, largest = sum(requests), max(requests)
        needs.append((free, together, largest, together - largest))
    return Stretch(ops, tuple(needs), sum(op[1] + op[4] - 1 for op in ops[:count]))
