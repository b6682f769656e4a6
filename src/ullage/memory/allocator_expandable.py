"""Expandable segments: a virtual range whose pages are mapped on demand (2 MiB small pool, 20 MiB large pool).

Follows ``find_expandable_block``, ``map_block`` and ``unmap_block`` of pytorch c10/cuda/CUDACachingAllocator.cpp.
Ranges start at a multiple of the page, so an address says by itself where pages begin.
"""

from __future__ import annotations

from collections.abc import Callable

from ullage.memory.allocator_blocks import FREE, UNMAPPED, Block, Pool


def least_expandable(pool: Pool, index: int) -> int:
    """Best fit from ``index`` on by the size that a block could grow to, so that a segment's open end is used last."""
    while index + 1 < len(pool.free) and _expanded_size(pool.at(index + 1)) < _expanded_size(pool.at(index)):
        index += 1
    return index


def expand(pool: Pool, size: int, room: int, reserve: Callable[[Pool], Block]) -> tuple[Block | None, int]:
    """A block of at least ``size`` at the lowest address with room, and the bytes newly mapped for it.

    The block is None where the driver's ``room`` did not suffice; what was mapped until then stays, as a free block.
    """
    block = _lowest_run(pool, size) or reserve(pool)
    mapped = 0
    if block.state == UNMAPPED:
        mapped = _map(pool, block, min(block.size, size), room)
        if not mapped:
            return None, 0
        block = pool.release(block)
    while block.size < size:
        follower = block.next
        assert follower is not None
        assert follower.state == UNMAPPED
        more = _map(pool, follower, min(size - block.size, follower.size), room - mapped)
        if not more:
            return None, mapped
        mapped += more
        block = pool.release(follower)
    pool.remove(block)
    return block, mapped


def unmap(pool: Pool, block: Block) -> int:
    """Return the whole pages inside a free block to the driver; the bytes that this gave back."""
    begin = -(-block.address // pool.page) * pool.page
    end = (block.address + block.size) // pool.page * pool.page
    if begin >= end:
        return 0
    pool.remove(block)
    if begin > block.address:
        front = block
        block = pool.split(front, begin - front.address, UNMAPPED)
        pool.insert(front)
    if end < block.address + block.size:
        pool.insert(pool.split(block, end - block.address, FREE))
    block = pool.file_unmapped(block)
    if block.prev is None and block.next is None:  # nothing of the range is left: its addresses go back too
        pool.unmapped.remove(block.address)
        del pool.blocks[block.address]
    return end - begin


def _expanded_size(block: Block) -> int:
    follower = block.next
    return block.size + (follower.size if follower is not None and follower.state == UNMAPPED else 0)


def _lowest_run(pool: Pool, size: int) -> Block | None:
    """Where the lowest run of free and unmapped ranges with room for ``size`` begins; it holds an unmapped one."""
    for address in pool.unmapped:
        start = pool.blocks[address]
        if start.prev is not None and start.prev.state == FREE:
            start = start.prev
        room = 0
        block: Block | None = start
        while room < size and block is not None and block.state in (FREE, UNMAPPED):
            room += block.size
            block = block.next
        if room >= size:
            return start
    return None


def _map(pool: Pool, block: Block, size: int, room: int) -> int:
    """Back the first pages of an unmapped range, enough for ``size``: all of them, or 0 where there is no room.

    The caller releases the block, which files it.
    """
    mapped = -(-size // pool.page) * pool.page
    if mapped > room:
        return 0
    pool.unmapped.remove(block.address)
    block.state = FREE
    if mapped < block.size:
        pool.file_unmapped(pool.split(block, mapped, UNMAPPED))
    return mapped
