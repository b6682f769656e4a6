"""torch's CUDA caching allocator, simulated on sizes alone.

Follows pytorch c10/cuda/CUDACachingAllocator.cpp at 001074d2 (about the 2.6 tree) step by step. Left out: private pools
(CUDA graphs, MemPool), free-memory callbacks, and the driver's choice of addresses: here a new segment lies above all
earlier ones, which matters only between free blocks of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable

from ullage.errors import InvalidInput, UllageError
from ullage.memory.allocator_blocks import (
    ALLOCATED,
    FREE,
    LARGE_SEGMENT_BYTES,
    NO_LIMIT,
    PENDING,
    SMALL_BYTES,
    UNMAPPED,
    Block,
    Clock,
    Pool,
    Segment,
    round_bytes,
    segment_bytes,
)
from ullage.memory.allocator_expandable import expand, least_expandable, unmap
from ullage.units import TIB, format_bytes

NULL = 0  # what an allocation of 0 bytes returns: it holds nothing and is in no statistic
FREE_EVENT = -1  # the size that makes an event of ``replay`` a free
_UNBOUNDED_ADDRESS_SPACE_BYTES = 2**10 * TIB


class OutOfMemory(UllageError):
    """No room, after the cache was flushed; ``tried_bytes`` is the segment's size, as in torch's own message."""

    code = "out-of-memory"

    def __init__(self, *, tried_bytes: int, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"out of memory: tried to allocate {format_bytes(tried_bytes)} with {format_bytes(allocated_bytes)} "
            f"allocated and {format_bytes(reserved_bytes - allocated_bytes)} reserved but unallocated"
        )
        self.tried_bytes = tried_bytes
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


class CachingAllocator:
    """One device's allocator. A handle is the block's address.

    ``capacity_bytes``: what the driver can give this process (device memory less context, NCCL, other processes).
    ``allowed_bytes``: ``set_per_process_memory_fraction`` as bytes; the garbage collector works only with it.
    ``allocated_bytes`` counts whole blocks handed out, with a remainder too small to split off, as torch does.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        expandable_segments: bool = False,
        max_split_size_bytes: int | None = None,
        max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES,
        roundup_power2_divisions: int = 0,
        allowed_bytes: int | None = None,
        garbage_collection_threshold: float = 0.0,
    ) -> None:
        if max_split_size_bytes is not None and max_split_size_bytes <= LARGE_SEGMENT_BYTES:
            raise InvalidInput("must exceed 20 MiB", key="max_split_size", value=max_split_size_bytes)
        if roundup_power2_divisions & (roundup_power2_divisions - 1):
            raise InvalidInput("must be a power of two", key="roundup_power2_divisions", value=roundup_power2_divisions)
        self._capacity = NO_LIMIT if capacity_bytes is None else capacity_bytes
        self._allowed = NO_LIMIT if allowed_bytes is None else allowed_bytes
        self._expandable = expandable_segments
        self._max_split = NO_LIMIT if max_split_size_bytes is None else max_split_size_bytes
        self._max_non_split_rounding = max_non_split_rounding_bytes
        self._divisions = roundup_power2_divisions
        self._gc_bytes = None  # the collector's threshold
        if allowed_bytes is not None and garbage_collection_threshold > 0:
            self._gc_bytes = int(garbage_collection_threshold * allowed_bytes)
        self._plain = not expandable_segments and max_split_size_bytes is None and self._gc_bytes is None
        self._next_address = LARGE_SEGMENT_BYTES  # not 0, which is NULL
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._small_clock, self._large_clock = Clock(), Clock()
        self._active: dict[int, Block] = {}
        self._uses: dict[int, set[int]] = {}  # address -> other streams that use the block
        self._pending: list[tuple[Block, set[int]]] = []  # freed, waiting for these streams
        self._finished: list[Block] = []  # no longer waiting; the next malloc takes them back
        self._named: dict[int, int] = {}  # replay's own ids -> handles
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_alloc_retries = 0

    def malloc(self, n_bytes: int, stream: int = 0) -> int:
        """Allocate; returns the handle. Raises OutOfMemory where torch would."""
        if n_bytes == 0:
            return NULL
        assert n_bytes > 0
        if self._finished:
            self._take_back_finished()
        size = round_bytes(n_bytes, self._divisions)
        pool = (self._small if size <= SMALL_BYTES else self._large).get(stream) or self._new_pool(stream, size)
        block = self._best_fit(pool, size) or self._new_block(pool, size, n_bytes)
        if block.size - size >= pool.least_remainder and size < pool.split_below:
            pool.insert(pool.split(block, size, FREE))
        block.state = ALLOCATED
        address = block.address
        self._active[address] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return address

    def free(self, handle: int) -> None:
        """Give back; a block that other streams use waits for them (``synchronize``) and stays active meanwhile."""
        if handle == NULL:
            return
        block = self._active.pop(handle)
        self.allocated_bytes -= block.size
        if self._uses and handle in self._uses:
            block.state = PENDING
            self._pending.append((block, self._uses.pop(handle)))
        else:
            block.pool.release(block)

    def record_stream(self, handle: int, stream: int) -> None:
        """Another stream uses the block; its own stream needs no recording."""
        if handle != NULL and stream != self._active[handle].pool.stream:
            self._uses.setdefault(handle, set()).add(stream)

    def synchronize(self, stream: int) -> None:
        """All work queued on ``stream`` is done: frees that waited for it take effect at the next malloc."""
        for _, streams in self._pending:
            streams.discard(stream)
        self._finished += [block for block, streams in self._pending if not streams]
        self._pending = [(block, streams) for block, streams in self._pending if streams]

    def empty_cache(self) -> None:
        """Wait for every pending free, then return unsplit free segments and whole free pages to the driver."""
        self._finished += [block for block, _ in self._pending]
        self._pending.clear()
        self._take_back_finished()
        for pool in (*self._large.values(), *self._small.values()):
            for block in pool.free_blocks():
                if self._expandable:
                    self.reserved_bytes -= unmap(pool, block)
                elif block.prev is None and block.next is None:
                    self._release_segment(block)

    def replay(self, events: Iterable[tuple[int, int, int]]) -> OutOfMemory | None:
        """Run (id, bytes or FREE_EVENT, stream) events; ids are the caller's and live on between calls.

        Returns the first failure, with the state as it stood then, or None.
        """
        malloc, free, named = self.malloc, self.free, self._named
        try:
            for name, size, stream in events:
                if size == FREE_EVENT:
                    free(named.pop(name))
                else:
                    named[name] = malloc(size, stream)
        except OutOfMemory as failure:
            return failure
        return None

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def segments(self) -> tuple[Segment, ...]:
        """What is reserved, in address order, with every block."""
        pools = (*self._small.values(), *self._large.values())
        return tuple(sorted((found for pool in pools for found in pool.segments()), key=lambda found: found.address))

    # --- finding a block ------------------------------------------------------------------------------------------

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        free = pool.free
        index = pool.first_fit(size)
        if self._plain:
            if index == len(free):
                return None
        else:
            pool.clock.lookups += 1
            if index == len(free):
                return None
            if self._expandable:
                index = least_expandable(pool, index)
            found = pool.at(index).size
            limit = self._max_split if size < self._max_split else size + self._max_non_split_rounding
            if found >= limit:  # kept whole for a request of its own kind; torch looks no further either
                return None
        block = pool.at(index)
        del free[index]
        return block

    def _new_block(self, pool: Pool, size: int, n_bytes: int) -> Block:
        """A block from the driver; where it has no more, ever more of the cache is given up first."""
        segment = segment_bytes(size)
        if self._gc_bytes is not None:
            self._collect_garbage(self._gc_bytes)
        block = self._ask_driver(pool, size, segment)
        if block is None and self._release_oversize(pool, size):
            block = self._ask_driver(pool, size, segment)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._ask_driver(pool, size, segment)
        if block is None:
            raise OutOfMemory(
                tried_bytes=segment,
                requested_bytes=n_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        return block

    def _ask_driver(self, pool: Pool, size: int, segment: int) -> Block | None:
        if self.reserved_bytes + segment > self._allowed:
            return None
        room = self._capacity - self.reserved_bytes
        if self._expandable:
            block, mapped = expand(pool, size, room, self._reserve_addresses)
        elif segment <= room:
            block, mapped = Block(self._next_address, segment, pool, FREE), segment
            pool.blocks[self._next_address] = block
            self._next_address += segment
        else:
            return None
        self.reserved_bytes += mapped
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return block

    def _reserve_addresses(self, pool: Pool) -> Block:
        """Addresses for an expandable segment, 1 1/8 of the device's memory, aligned to its pages; none is mapped."""
        bounded = self._capacity != NO_LIMIT
        span = self._capacity + self._capacity // 8 if bounded else _UNBOUNDED_ADDRESS_SPACE_BYTES
        span = -(-span // pool.page) * pool.page
        address = -(-self._next_address // pool.page) * pool.page
        self._next_address = address + span
        block = pool.blocks[address] = Block(address, span, pool, UNMAPPED)
        pool.file_unmapped(block)
        return block

    def _new_pool(self, stream: int, size: int) -> Pool:
        is_small = size <= SMALL_BYTES
        pool = Pool(
            stream=stream,
            clock=self._small_clock if is_small else self._large_clock,
            is_small=is_small,
            expandable=self._expandable,
            max_split=self._max_split,
        )
        (self._small if is_small else self._large)[stream] = pool
        return pool

    # --- giving memory back ---------------------------------------------------------------------------------------

    def _take_back_finished(self) -> None:
        for block in self._finished:
            block.pool.release(block)
        self._finished.clear()

    def _release_segment(self, block: Block) -> None:
        block.pool.remove(block)
        del block.pool.blocks[block.address]
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release the smallest oversize block that covers the request, else the largest ones until their sum does."""
        if self._max_split == NO_LIMIT or self._expandable:
            return False
        wanted = max(size, self._max_split)
        index = pool.first_fit(wanted)
        if index < len(pool.free):
            self._release_segment(pool.at(index))
            return True
        released = 0
        while released < wanted and pool.free and (largest := pool.at(-1)).size >= self._max_split:
            released += largest.size
            self._release_segment(largest)
        return released >= wanted

    def _collect_garbage(self, threshold: int) -> None:
        """Release the free large segments that went unused longest, those of at least mean age per round."""
        target = self.reserved_bytes - threshold
        cached = [block for _, pool in sorted(self._large.items()) for block in pool.free_blocks()]
        now = self._large_clock.lookups
        ages = {block: now - block.inserted_at for block in cached if block.prev is None and block.next is None}
        while target > 0 and ages:
            mean = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= mean]:
                target -= block.size
                self._release_segment(block)
                del ages[block]
