"""A CUDA memory snapshot of torch, read from its file: who holds what, and what the allocator keeps without use.

``torch.cuda.memory._snapshot()`` as ``_dump_snapshot`` writes it, and the bare list of segments that older versions wrote. The
file is data from elsewhere: it is read by snapshot_pickle, every field is checked, and what is visited is counted, since a
small file can name one object a million times.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ullage.errors import InvalidInput
from ullage.frozen import frozen
from ullage.postmortem.snapshot_frames import Frame, category_of, words
from ullage.postmortem.snapshot_history import Held, Recorded, at_peak
from ullage.postmortem.snapshot_pickle import loads
from ullage.units import GIB, format_bytes

LARGEST_FILE_BYTES = GIB // 2
MOST_VISITED = 50_000_000
MOST_FRAMES = 256  # of one block; torch's own stacks are shorter
LONGEST_TEXT = 1000  # of a file's or function's name
ACTIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_STATES = (*ACTIVE, "inactive")
_LARGEST_INT = 1 << 63


@frozen
class Pool:
    """Segments of one kind on one stream. largest_free_bytes: of one block, so the largest request that the cache serves."""

    name: str
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


@frozen
class Failed:
    """The request that failed, as the history records it. bytes: of the tensor, rounded; free_bytes: what the driver had left."""

    bytes: int
    free_bytes: int
    frames: tuple[Frame, ...]


@frozen
class Summary:
    """One device's memory at the time of the snapshot, the largest blocks first.

    split_bytes: free, in segments that are partly used, so that they cannot go back to the driver: fragmentation.
    at_peak: what was held when the recorded history was highest (None: no history was recorded). failed: its last out of memory.
    """

    device: int
    pools: tuple[Pool, ...]
    held: tuple[Held, ...]
    split_bytes: int
    at_peak: tuple[Held, ...] | None
    failed: Failed | None = None

    @property
    def allocated_bytes(self) -> int:
        return sum(one.bytes for one in self.held)

    @property
    def reserved_bytes(self) -> int:
        return sum(pool.reserved_bytes for pool in self.pools)

    @property
    def by_category(self) -> dict[str, int]:
        """Allocated bytes of each category that the frames speak for; ``unknown`` where none does."""
        totals: dict[str, int] = {}
        for one in self.held:
            totals[one.category] = totals.get(one.category, 0) + one.bytes
        return totals

    @property
    def peak_bytes(self) -> int | None:
        return None if self.at_peak is None else sum(one.bytes for one in self.at_peak)

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that is free and cannot go back to the driver."""
        return self.split_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


def read_snapshot(path: str | Path) -> dict[str, object]:
    """The snapshot in a file, as plain containers. Raises InvalidInput for whatever is no snapshot; nothing in it is run."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE_BYTES:
            raise InvalidInput(
                "is too large to read",
                key="snapshot",
                value=format_bytes(size),
                allowed=f"at most {format_bytes(LARGEST_FILE_BYTES)}",
                remedy="record fewer events: _record_memory_history(max_entries=100000)",
            )
        data = path.read_bytes()
    except OSError as error:
        raise InvalidInput("cannot be read", key="snapshot", value=str(path), remedy=error.strerror) from None
    try:
        found = loads(data)
    except InvalidInput as error:
        raise error.at(str(path)) from None
    if isinstance(found, list):
        found = {"segments": found, "device_traces": []}
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise _wrong("is no memory snapshot: it has no list of segments", type(found).__name__).at(str(path))
    return found


def devices(snapshot: dict[str, object]) -> tuple[int, ...]:
    """The devices with reserved memory or a history, the one with the most reserved first."""
    reader = _Reader()
    reserved: dict[int, int] = {}
    for segment in reader.dicts(snapshot.get("segments"), "segments"):
        device = reader.whole(segment, "device", default=0)
        reserved[device] = reserved.get(device, 0) + reader.whole(segment, "total_size")
    return tuple(sorted(reserved, key=lambda device: (-reserved[device], device)))


def summarise(snapshot: dict[str, object], *, device: int | None = None) -> Summary:
    """What one device (None: the one with the most reserved) holds, by pool, block and category."""
    there = devices(snapshot)
    if device is None:
        device = there[0] if there else 0
    elif device not in there:
        known = ", ".join(map(str, sorted(there))) or "none"
        raise InvalidInput("is no device of this snapshot", key="--device", value=device, allowed=known)
    reader = _Reader()
    history = list(reader.history(snapshot, device))
    frames = {change.address: change.frames for change in history if change.alive}
    pools: dict[str, list[tuple[int, int, int]]] = {}
    held: list[Held] = []
    split = 0
    for segment in reader.dicts(snapshot.get("segments"), "segments"):
        if reader.whole(segment, "device", default=0) != device:
            continue
        pool = _pool_name(reader, segment)
        blocks = list(reader.blocks(segment))
        mine = [_held(reader, block, pool, frames) for block in blocks if block.state in ACTIVE]
        held += mine
        allocated = sum(one.bytes for one in mine)
        total = reader.whole(segment, "total_size")
        free = [block.bytes for block in blocks if block.state not in ACTIVE]
        if allocated + sum(free) != total:
            raise _wrong("has a segment whose blocks do not fill it", f"{allocated + sum(free):,} of {total:,} bytes")
        split += sum(free) if mine else 0
        pools.setdefault(pool, []).append((total, allocated, max(free, default=0)))
    held.sort(key=lambda one: (-one.bytes, one.address))
    return Summary(
        device=device,
        pools=tuple(_pool(name, found) for name, found in sorted(pools.items())),
        held=tuple(held),
        split_bytes=split,
        at_peak=at_peak(held, history, reader.frames),
        failed=reader.failed(snapshot, device),
    )


def _pool(name: str, found: list[tuple[int, int, int]]) -> Pool:
    return Pool(
        name=name,
        segments=len(found),
        reserved_bytes=sum(total for total, _, _ in found),
        allocated_bytes=sum(allocated for _, allocated, _ in found),
        largest_free_bytes=max(free for _, _, free in found),
    )


def _held(reader: _Reader, block: _Block, pool: str, frames: dict[int, object]) -> Held:
    stack = reader.frames(block.frames) or reader.frames(frames.get(block.address))
    return Held(block.address, block.bytes, block.requested_bytes, pool, category_of(stack), words(stack))


def _pool_name(reader: _Reader, segment: dict[str, object]) -> str:
    """``large``, ``small, stream 3``, or the private pool of a CUDA graph or MemPool."""
    kind = segment.get("segment_type")
    name = kind if kind in ("small", "large") else "other"
    assert isinstance(name, str)
    stream = reader.whole(segment, "stream", default=0)
    owner = segment.get("segment_pool_id")
    if isinstance(owner, tuple) and any(isinstance(one, int) and one for one in owner[:2]):
        name = f"{name}, private pool {owner[0]!s:.20}"
    return f"{name}, stream {stream}" if stream else name


class _Block(NamedTuple):
    address: int
    bytes: int
    requested_bytes: int
    state: str
    frames: object


class _Reader:
    """Takes a snapshot apart, checks each field, and counts what it visits."""

    def __init__(self) -> None:
        self._left = MOST_VISITED

    def _visit(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _wrong("names too many objects, one of them again and again", f"more than {MOST_VISITED:,}")

    def dicts(self, found: object, what: str) -> Iterator[dict[str, object]]:
        if not isinstance(found, list | tuple):
            raise _wrong(f"has no list of {what}", type(found).__name__)
        for one in found:
            self._visit(1)
            if not isinstance(one, dict):
                raise _wrong(f"has an entry in {what} that is no dict", type(one).__name__)
            yield one

    def whole(self, entry: dict[str, object], name: str, *, default: int | None = None) -> int:
        value = entry.get(name, default)
        if type(value) is not int or not -1 <= value < 2 * _LARGEST_INT:
            raise _wrong(f"has no whole number as {name}", type(value).__name__)
        return value

    def size(self, entry: dict[str, object], name: str, *, default: int | None = None) -> int:
        value = self.whole(entry, name, default=default)
        if not 0 <= value < _LARGEST_INT:
            raise _wrong(f"has a negative {name}", value)
        return value

    def blocks(self, segment: dict[str, object]) -> Iterator[_Block]:
        at = self.whole(segment, "address")
        for block in self.dicts(segment.get("blocks"), "blocks"):
            state = block.get("state")
            if state not in _STATES:
                raise _wrong("has a block in an unknown state", type(state).__name__)
            assert isinstance(state, str)
            size = self.size(block, "size")
            history = next(self.dicts(block.get("history") or [], "history"), {})  # as torch 1.13 and 2.0 wrote it
            requested = self.size(block, "requested_size", default=self.size(history, "real_size", default=size))
            yield _Block(at, size, requested, state, block.get("frames", history.get("frames")))
            at += size

    def frames(self, found: object) -> tuple[Frame, ...]:
        if found is None:
            return ()
        if isinstance(found, list | tuple):
            found = found[:MOST_FRAMES]
        return tuple(
            Frame(_text(one.get("filename")), _text(one.get("name")), _line(one.get("line")))
            for one in self.dicts(found, "frames")
        )

    def failed(self, snapshot: dict[str, object], device: int) -> Failed | None:
        """The last request that was not met; what follows one that was caught is of another."""
        found = [
            entry for entry in self.dicts(_trace(snapshot, device), "device_traces") if entry.get("action") == "oom"
        ]
        if not found:
            return None
        size, free = self.size(found[-1], "size"), self.size(found[-1], "device_free", default=0)
        return Failed(bytes=size, free_bytes=free, frames=self.frames(found[-1].get("frames")))

    def history(self, snapshot: dict[str, object], device: int) -> Iterator[Recorded]:
        """The allocations and frees of a device that were recorded."""
        born: dict[int, object] = {}
        for entry in self.dicts(_trace(snapshot, device), "device_traces"):
            action = entry.get("action")
            if action != "alloc" and action != "free_completed":
                continue
            address = self.whole(entry, "addr")
            if action == "alloc":
                born[address] = entry.get("frames")
            yield Recorded(action == "alloc", address, self.size(entry, "size"), born.get(address))


def _trace(snapshot: dict[str, object], device: int) -> object:
    traces = snapshot.get("device_traces", [])
    if not isinstance(traces, list | tuple):
        raise _wrong("has no list of device_traces", type(traces).__name__)
    return traces[device] if 0 <= device < len(traces) else []


def _text(value: object) -> str:
    """The end of a text, since every rule looks through it."""
    return value[-LONGEST_TEXT:] if isinstance(value, str) else ""


def _line(value: object) -> int:
    return value if type(value) is int else 0


def _wrong(what: str, value: object) -> InvalidInput:
    return InvalidInput(
        what,
        key="snapshot",
        value=value,
        allowed="what torch.cuda.memory._dump_snapshot() writes",
    )
