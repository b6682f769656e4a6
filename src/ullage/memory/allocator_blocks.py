"""What the caching allocator keeps: blocks in address order, free ones in best-fit order. Constants with their source.

Source of every constant: pytorch c10/cuda/CUDACachingAllocator.cpp at 001074d2 (``kMinBlockSize`` and its neighbours).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort

from ullage.frozen import frozen
from ullage.units import MIB

MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer; also the page of a small expandable segment
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer, large_segment_size_mb; also the page of a large expandable segment
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: a request of this size gets a segment of its own
SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge
NO_LIMIT = sys.maxsize

# Block states, by the names that torch.cuda.memory_snapshot() gives them; it does not list unmapped ranges.
FREE = "inactive"
ALLOCATED = "active_allocated"
PENDING = "active_pending_free"
UNMAPPED = "unmapped"

_ADDRESS_BITS = 64
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


def segment_bytes(size: int) -> int:
    """The segment that a request of ``size`` (rounded) asks of the driver when no cached block fits."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


def round_bytes(n_bytes: int, divisions: int = 0) -> int:
    """A request as a block's size: a multiple of 512 B, or of one of ``divisions`` steps between powers of two."""
    if divisions > 1 and n_bytes > MIN_BLOCK_BYTES * divisions:
        step = (1 << n_bytes.bit_length() - 1) // divisions
        return -(-n_bytes // step) * step
    return (n_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


class Block:
    """A range of one segment; ``prev`` and ``next`` are its neighbours in the same segment."""

    __slots__ = ("address", "inserted_at", "next", "pool", "prev", "size", "state")

    def __init__(self, address: int, size: int, pool: Pool, state: str) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.state = state
        self.prev: Block | None = None
        self.next: Block | None = None
        self.inserted_at = 0  # the clock when the block became free: its age for the garbage collector


@frozen
class Segment:
    """What the driver handed out: one cudaMalloc, or one contiguous mapped run of an expandable segment."""

    address: int
    stream: int
    is_small: bool
    blocks: tuple[tuple[int, str], ...]  # (size in bytes, state), in address order

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.blocks)


class Clock:
    """Look-ups so far in all pools of one size class; counted only where the garbage collector is on."""

    __slots__ = ("lookups",)

    def __init__(self) -> None:
        self.lookups = 0


class Pool:
    """The blocks of one stream and one size class. Memory never moves to another stream or class but by the driver."""

    __slots__ = ("blocks", "clock", "free", "is_small", "least_remainder", "page", "split_below", "stream", "unmapped")

    def __init__(self, *, stream: int, clock: Clock, is_small: bool, expandable: bool, max_split: int) -> None:
        self.stream = stream
        self.clock = clock
        self.is_small = is_small
        self.page = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        splits_freely = is_small or expandable
        self.least_remainder = MIN_BLOCK_BYTES if splits_freely else SMALL_BYTES + 1
        self.split_below = NO_LIMIT if splits_freely else max_split
        self.blocks: dict[int, Block] = {}  # every block, by address
        # (size, address) of each free block as one integer, which compares faster than a tuple; ascending
        self.free: list[int] = []
        self.unmapped: list[int] = []  # addresses of the unmapped ranges, ascending

    def insert(self, block: Block) -> None:
        """Put a block among the free ones."""
        block.state = FREE
        block.inserted_at = self.clock.lookups
        insort(self.free, block.size << _ADDRESS_BITS | block.address)

    def remove(self, block: Block) -> None:
        """Take a block from the free ones; the caller says what it becomes."""
        del self.free[bisect_left(self.free, block.size << _ADDRESS_BITS | block.address)]

    def first_fit(self, size: int) -> int:
        """Index in ``free`` of the smallest block of at least ``size``, the lowest address among equals."""
        return bisect_left(self.free, size << _ADDRESS_BITS)

    def at(self, index: int) -> Block:
        return self.blocks[self.free[index] & _ADDRESS_MASK]

    def free_blocks(self) -> list[Block]:
        """The free blocks in best-fit order, as a list of its own so that the pool may change meanwhile."""
        return [self.at(index) for index in range(len(self.free))]

    def split(self, block: Block, size: int, rest_state: str) -> Block:
        """Cut ``block`` to ``size`` and return what is left, which the caller files."""
        rest = Block(block.address + size, block.size - size, self, rest_state)
        follower = block.next
        if follower is not None:
            follower.prev = rest
        rest.prev, rest.next, block.next = block, follower, rest
        block.size = size
        self.blocks[rest.address] = rest
        return rest

    def join(self, block: Block) -> Block:
        """Merge ``block`` with what follows it; neither may be filed at this moment."""
        follower = block.next
        assert follower is not None
        block.size += follower.size
        after = block.next = follower.next
        if after is not None:
            after.prev = block
        del self.blocks[follower.address]
        return block

    def release(self, block: Block) -> Block:
        """Make a block free, merged with its free neighbours; returns the merged block."""
        before, after = block.prev, block.next
        if before is not None and before.state == FREE:
            self.remove(before)
            block = self.join(before)
        if after is not None and after.state == FREE:
            self.remove(after)
            self.join(block)
        self.insert(block)
        return block

    def file_unmapped(self, block: Block) -> Block:
        """File a range as unmapped, merged with unmapped neighbours; returns the merged range."""
        block.state = UNMAPPED
        before, after = block.prev, block.next
        if before is not None and before.state == UNMAPPED:
            self.unmapped.remove(before.address)
            block = self.join(before)
        if after is not None and after.state == UNMAPPED:
            self.unmapped.remove(after.address)
            self.join(block)
        insort(self.unmapped, block.address)
        return block

    def segments(self) -> list[Segment]:
        found: list[Segment] = []
        for address in sorted(self.blocks):
            head = block = self.blocks[address]
            if head.state == UNMAPPED or (head.prev is not None and head.prev.state != UNMAPPED):
                continue
            run = [(head.size, head.state)]
            while block.next is not None and block.next.state != UNMAPPED:
                block = block.next
                run.append((block.size, block.state))
            found.append(Segment(address=address, stream=self.stream, is_small=self.is_small, blocks=tuple(run)))
        return found
