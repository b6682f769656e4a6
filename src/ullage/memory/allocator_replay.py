"""A program's reserved memory, fast: the caching allocator's rules, on nothing but sizes and addresses.

The answer is that of ``CachingAllocator``, of expandable segments while the driver has memory: a test holds the two against each other
on random programs. What makes it several times faster: a part of a program without micro-batch marks is compiled once and played as often
as it occurs; a block is one integer; what is allocated in a row and freed at once is not played where there is room for it; and
micro-batches that find the allocator as an earlier one found it are not played again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from ullage.memory.allocator_blocks import LARGE_SEGMENT_BYTES, MIN_BLOCK_BYTES, SMALL_SEGMENT_BYTES, segment_bytes
from ullage.memory.allocator_ops import ADDRESS_BITS, ADDRESS_MASK, Compiler, Op, Part, Stretch
from ullage.memory.program import Node, Repeat, Sequence
from ullage.memory.scopes import OpenScopes

_GAP_BYTES = MIN_BLOCK_BYTES  # left between two segments, so that blocks of different ones are never neighbours
_RANGE_BITS = 50
"""Of an expandable segment's addresses, more than any driver has: what is free at their open end is the best fit only where nothing
else fits, as in least_expandable (allocator_expandable.py)."""
MOST_BYTES = 1 << _RANGE_BITS - 1
"""Only the open end has as many free, and no program that is played may need as many."""
_Range = tuple[int, int]  # addresses of a block: from, to
_NOWHERE: _Range = (0, 0)
_Stacks = defaultdict[int, list[tuple[_Range, ...]]]  # live blocks by the item that they hold, the youngest last


class Full(Exception):
    """The driver has no more, after the cache was flushed."""


class Replay:
    """An allocator playing programs, one after another. ``capacity_bytes``: what the driver can give; of plain segments alone.

    before: one whose play has ended, with plain segments too; what it has compiled is not compiled again.
    """

    def __init__(
        self, capacity_bytes: int | None = None, *, expandable: bool = False, before: Replay | None = None
    ) -> None:
        assert not expandable or (capacity_bytes is None and before is None)
        self._capacity = capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._compiler: Compiler = before._compiler if before else Compiler(self._range if expandable else None)
        self._compiler.empty()
        self._mapped: list[tuple[int, int]] = []  # of each expandable segment: its page, and the bytes that are backed
        self._starts: dict[int, int] = {}  # of each free block: where it begins -> where it ends
        self._ends: dict[int, int] = {}  # and the other way round
        self._segments: dict[int, int] = {}
        self._next_address = MIN_BLOCK_BYTES
        self._shared: _Stacks = defaultdict(list)
        self._scope = self._shared
        self._opened: OpenScopes[_Stacks] = OpenScopes(lambda: defaultdict(list))

    def play(self, node: Node) -> None:
        """A whole program, or a part with all of its micro-batches' scopes. Raises Full."""
        if not (node.forwards or node.backwards or node.weights):
            for part in self._compiler.parts(node):
                self._play(part)
        elif isinstance(node, Repeat):
            self._repeat(node)
        else:
            assert isinstance(node, Sequence)
            self._enter(node.scope)
            for child in node.children:
                self.play(child)
            self._leave(node.scope)

    def _enter(self, scope: tuple[str, int] | None) -> None:
        if scope is not None:
            self._scope = self._opened.enter(*scope)

    def _leave(self, scope: tuple[str, int] | None) -> None:
        if scope is not None:
            closed = self._opened.leave(*scope)
            for where, blocks in (
                closed.items() if closed is not None else ()
            ):  # what it leaves outlives its micro-batch
                self._shared[where].extend(blocks)
            self._scope = self._shared

    def _repeat(self, node: Repeat) -> None:
        """What happens next depends on the state alone: once a state is back, so is all that followed it, and its peaks."""
        seen: dict[object, int] = {}
        left = node.times
        while left:
            if not node.child.delta_bytes:  # otherwise no state comes back
                before = seen.setdefault(self._state(), left)
                if before != left:
                    left %= before - left
                    seen.clear()
                    if not left:
                        return
            self.play(node.child)
            left -= 1

    def _state(self) -> object:
        """All that later choices depend on. No segment came or went between two states with the same next address."""
        opened = self._opened.state(_frozen)
        return self._next_address, self._compiler.free_blocks(), _frozen(self._shared), opened

    def _range(self, is_small: bool) -> list[int]:
        """The free blocks of a new pool whose one segment expands: all of its addresses."""
        self._mapped.append((SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES, 0))
        size, address = 1 << _RANGE_BITS, len(self._mapped) << _RANGE_BITS + 1
        self._starts[address], self._ends[address + size] = address + size, address
        return [size << ADDRESS_BITS | address]

    def _map(self, end: int) -> None:
        """Backs an expandable segment up to an address by whole pages; none goes back while the driver has more."""
        number = (end >> _RANGE_BITS + 1) - 1
        page, mapped = self._mapped[number]
        more = -(-(end - (number + 1 << _RANGE_BITS + 1)) // page) * page - mapped
        if more > 0:
            self._mapped[number] = page, mapped + more
            self.reserved_bytes += more
            self.peak_reserved_bytes = self.reserved_bytes

    def _play(self, part: Part) -> None:
        if part.inner:
            for _ in range(part.times):
                for inner in part.inner:
                    self._play(inner)
            return
        slots = self._taken(part)
        for stretch in part.stretches:
            if not (stretch.needs and self._changes_nothing(stretch)):
                self._run(stretch.ops, slots)
        for stack, first, stop in part.keeps:
            self._scope[stack].append(tuple(slots[first:stop]))

    def _changes_nothing(self, stretch: Stretch) -> bool:
        """Whether there is room for what is freed again, so that the state comes back, and no new peak."""
        if self.allocated_bytes + stretch.rise_bytes > self.peak_allocated_bytes:
            return False
        for free, together, largest, others in stretch.needs:
            if not free or (free[-1] < together and (free[-1] < largest or len(free) == 1 or free[-2] < others)):
                return False
        return True

    def _run(self, ops: tuple[Op, ...], slots: list[_Range]) -> None:
        starts, ends = self._starts, self._ends
        allocated, peak = self.allocated_bytes, self.peak_allocated_bytes
        for slot, size, request, free, least in ops:
            if size > 0:
                index = bisect_left(free, request)
                try:
                    block = free[index]
                except IndexError:
                    index = self._new_segment(size, free)
                    block = free[index]
                address = block & ADDRESS_MASK
                end = starts.pop(address)
                rest = address + size
                left = end - rest
                if left >= least:
                    slots[slot] = address, rest
                    starts[rest] = end
                    ends[end] = rest
                    block += size - request  # seldom smaller than the one before it
                    if index and free[index - 1] > block:
                        del free[index]
                        insort(free, block, 0, index)
                    else:
                        free[index] = block
                    allocated += size
                    if left > MOST_BYTES:
                        self._map(rest)
                else:
                    slots[slot] = address, end
                    del free[index], ends[end]
                    allocated += end - address
                if allocated > peak:
                    peak = allocated
            elif not size:
                address, end = slots[slot]
                allocated -= end - address
                if end in starts:
                    after = starts.pop(end)
                    del free[bisect_left(free, after - end << ADDRESS_BITS | end)]
                    end = after
                if address in ends:
                    before = ends.pop(address)
                    del free[bisect_left(free, address - before << ADDRESS_BITS | before)]
                    address = before
                starts[address] = end
                ends[end] = address
                insort(free, end - address << ADDRESS_BITS | address)
            else:  # the state is as before; what counts is whether there was room, and the peak
                index = bisect_left(free, request)
                if index == len(free):
                    index = self._new_segment(-size, free)
                rest = (free[index] >> ADDRESS_BITS) + size
                top = allocated - size + (rest if rest < least else 0)
                if top > peak:
                    peak = top
                if rest > MOST_BYTES:
                    self._map((free[index] & ADDRESS_MASK) - size)
        self.allocated_bytes, self.peak_allocated_bytes = allocated, peak

    def _taken(self, part: Part) -> list[_Range]:
        """A part's slots, with the blocks that it frees and did not allocate."""
        slots, scope = [_NOWHERE] * part.slots, self._scope
        for stack, first, stop in part.takes:
            slots[first:stop] = (scope[stack] or self._elsewhere(stack)).pop()
        return slots

    def _elsewhere(self, stack: int) -> list[tuple[_Range, ...]]:
        if self._shared[stack]:
            return self._shared[stack]
        for scope in self._opened:
            if scope[stack]:
                return scope[stack]
        raise AssertionError("something is freed and was never allocated")

    def _new_segment(self, size: int, free: list[int]) -> int:
        """A segment as a free block; its index in ``free``, where no other is large enough."""
        segment = segment_bytes(size)
        if self._capacity is not None and self.reserved_bytes + segment > self._capacity:
            self._empty_cache()
            if self.reserved_bytes + segment > self._capacity:
                raise Full
        address = self._next_address
        self._next_address += segment + _GAP_BYTES
        self._segments[address] = segment
        self._starts[address], self._ends[address + segment] = address + segment, address
        self.reserved_bytes += segment
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        free.append(segment << ADDRESS_BITS | address)
        return len(free) - 1

    def _empty_cache(self) -> None:
        """Give whole free segments back to the driver."""
        for free in self._compiler.pools.values():
            for block in tuple(free):
                address, size = block & ADDRESS_MASK, block >> ADDRESS_BITS
                if self._segments.get(address) == size:
                    free.remove(block)
                    del self._segments[address], self._starts[address], self._ends[address + size]
                    self.reserved_bytes -= size


def _frozen(stacks: _Stacks) -> object:
    return frozenset((where, tuple(blocks)) for where, blocks in stacks.items() if blocks)
