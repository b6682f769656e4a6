"""From allocated to reserved: a program's events, fed to the caching allocator's simulation."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.frozen import frozen
from ullage.memory.allocator import FREE_EVENT, CachingAllocator
from ullage.memory.allocator_replay import MOST_BYTES, Full, Replay
from ullage.memory.program import Node, written_out


@frozen
class Reserved:
    """What the allocator held at most: ``allocated_bytes`` in blocks handed out, ``reserved_bytes`` from the driver."""

    allocated_bytes: int
    reserved_bytes: int


def simulate(program: Node, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> Reserved:
    """Peaks over a whole program, event by event.

    capacity_bytes: what the driver can give. Near it the allocator first gives back what it holds unused; a program that does not
    fit even so is answered as if there were no limit.
    """
    if program.peak_bytes >= MOST_BYTES:  # half a PiB: no node has as much, and what is lost to blocks does not matter
        return Reserved(allocated_bytes=program.peak_bytes, reserved_bytes=program.peak_bytes)
    within: Replay | None = None
    if capacity_bytes is not None and not expandable_segments and program.peak_bytes <= capacity_bytes:
        within = Replay(capacity_bytes)
        try:  # where the driver never comes to its end, this is what happens without one
            within.play(program)
            return _peaks(within)
        except Full:
            pass
    played = Replay(expandable=expandable_segments, before=within)
    played.play(program)
    found = _peaks(played)
    if not expandable_segments or capacity_bytes is None:
        return found
    if not found.allocated_bytes <= capacity_bytes < found.reserved_bytes:
        return found
    return _expandable(program, capacity_bytes) or found


def _peaks(played: Replay | CachingAllocator) -> Reserved:
    return Reserved(allocated_bytes=played.peak_allocated_bytes, reserved_bytes=played.peak_reserved_bytes)


def _expandable(program: Node, capacity_bytes: int) -> Reserved | None:
    allocator = CachingAllocator(expandable_segments=True, capacity_bytes=capacity_bytes)
    return None if allocator.replay(_triples(program)) is not None else _peaks(allocator)


def _triples(program: Node) -> Iterator[tuple[int, int, int]]:
    """Events as the allocator takes them; the tensors of an item that has pieces get handles of their own."""
    for handle, item, alive in written_out(program):
        if item.pieces:
            first = -1 - handle * _MOST_PIECES
            for offset, size in enumerate(item.pieces):
                yield first - offset, (size if alive else FREE_EVENT), item.stream
        else:
            yield handle, (item.bytes if alive else FREE_EVENT), item.stream


_MOST_PIECES = 1 << 20
