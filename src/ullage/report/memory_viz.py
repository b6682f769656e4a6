"""A timeline as a memory snapshot: the dict of ``torch.cuda.memory._snapshot()``, for torch.cuda._memory_viz and its page.

The caching allocator's simulation says where each block lies, so that segments, blocks and events agree as they do in a real
snapshot. A block's frames are no call stack: they say its category and name, how its bytes come about, and the moments.
Field names and states: torch/csrc/cuda/Module.cpp and torch/utils/viz/MemoryViz.js of pytorch.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from collections.abc import Sequence as ListLike

from ullage.memory.allocator import CachingAllocator, OutOfMemory
from ullage.memory.allocator_blocks import ALLOCATED
from ullage.memory.allocator_blocks import Segment as Reserved
from ullage.report.timeline import Timeline, TimelineEvent

PROTOCOL = 4  # the highest that the page reads
UNKNOWN = "unknown"

Entry = dict[str, object]


def snapshot(timeline: Timeline, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> Entry:
    """The snapshot at a timeline's end, with its whole trace.

    capacity_bytes: what the driver can give. A timeline that does not fit even after the cache is given back is shown as if
    there were no limit.
    """
    recording = _Recording(CachingAllocator(expandable_segments=expandable_segments), expandable_segments)
    recording.run(timeline.events)
    if capacity_bytes is not None and recording.allocator.peak_reserved_bytes > capacity_bytes:
        allocator = CachingAllocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
        limited = _Recording(allocator, expandable_segments)
        try:
            limited.run(timeline.events)
            recording = limited
        except OutOfMemory:
            pass
    return {
        "segments": recording.segments(),
        "device_traces": [[*recording.trace, _end_of(timeline)]],
        "allocator_settings": _settings(expandable_segments),
        "external_annotations": _annotations(timeline),
    }


def dumps(found: Mapping[str, object]) -> bytes:
    """The snapshot as a file: plain containers, in the protocol that the page reads."""
    return pickle.dumps(dict(found), protocol=PROTOCOL)


def _settings(expandable_segments: bool) -> Entry:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable_segments}",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": expandable_segments,
        "roundup_power2_divisions": {},
    }


def _end_of(timeline: Timeline) -> Entry:
    """The event that taking a snapshot leaves. Its category is here because the page fails on a trace that has categories
    and none of this name (annotate_snapshot in MemoryViz.js)."""
    return {
        "action": "snapshot",
        "addr": 0,
        "size": 0,
        "stream": 0,
        "time_us": timeline.end,
        "frames": [],
        "category": UNKNOWN,
    }


def _annotations(timeline: Timeline) -> list[Entry]:
    """Moments as torch records its own annotations: where each starts and ends, an inner end before an outer one."""
    marks = []
    for span in timeline.spans:
        marks.append((span.start, 1, span.depth, "START", span.name))
        marks.append((span.end, 0, -span.depth, "END", span.name))
    return [{"stage": stage, "name": name, "device": 0, "time_us": time} for time, _, _, stage, name in sorted(marks)]


class _Recording:
    """Runs events through an allocator and writes down what torch would."""

    def __init__(self, allocator: CachingAllocator, expandable: bool) -> None:
        self.allocator = allocator
        self.trace: list[Entry] = []
        self._grow, self._shrink = ("segment_map", "segment_unmap") if expandable else ("segment_alloc", "segment_free")
        self._expandable = expandable
        self._reserved: dict[int, tuple[int, int]] = {}  # address -> (size, stream)
        self._live: dict[int, TimelineEvent] = {}  # by address
        self._address: dict[int, int] = {}  # by handle
        self._frames: dict[tuple[str, str, str, str], list[Entry]] = {}

    def run(self, events: ListLike[TimelineEvent]) -> None:
        allocator = self.allocator
        for event in events:
            if event.alive:
                before = allocator.reserved_bytes, allocator.num_alloc_retries
                address = allocator.malloc(event.bytes, event.stream)
                if before != (allocator.reserved_bytes, allocator.num_alloc_retries):
                    self._note_segments(event, address, before)
                self._address[event.handle] = address
                self._live[address] = event
                self.trace.append(self._block_entry("alloc", address, event, event))
            else:
                address = self._address.pop(event.handle)
                born = self._live.pop(address)
                allocator.free(address)
                self.trace.append(self._block_entry("free_requested", address, born, event))
                self.trace.append(self._block_entry("free_completed", address, born, event))

    def _note_segments(self, event: TimelineEvent, address: int, before: tuple[int, int]) -> None:
        reserved_bytes, retries = before
        if (
            retries == self.allocator.num_alloc_retries and not self._expandable
        ):  # one new segment, the block at its start
            size = self.allocator.reserved_bytes - reserved_bytes
            self._reserved[address] = size, event.stream
            self.trace.append(_segment_entry(self._grow, address, size, event.stream, event.time))
            return
        now = {one.address: (one.size, one.stream) for one in self.allocator.segments()}
        for gone in _difference(self._reserved, now):
            self.trace.append(_segment_entry(self._shrink, *gone, event.time))
        for new in _difference(now, self._reserved):
            self.trace.append(_segment_entry(self._grow, *new, event.time))
        self._reserved = now

    def _block_entry(self, action: str, address: int, born: TimelineEvent, event: TimelineEvent) -> Entry:
        return {
            "action": action,
            "addr": address,
            "size": born.bytes,
            "stream": born.stream,
            "time_us": event.time,
            "frames": self._frames_of(born),
            "category": born.category,
        }

    def _frames_of(self, event: TimelineEvent) -> list[Entry]:
        key = (event.category, event.what, event.detail, event.moment)
        if key not in self._frames:
            lines = [(event.category, event.what), ("bytes", event.detail), ("moment", event.moment)]
            self._frames[key] = [{"filename": file, "line": 0, "name": name} for file, name in lines if name]
        return self._frames[key]

    def segments(self) -> list[Entry]:
        """Every segment with its blocks, in address order."""
        return [self._segment(found) for found in self.allocator.segments()]

    def _segment(self, found: Reserved) -> Entry:
        blocks: list[Entry] = []
        address = found.address
        requested = allocated = 0
        for size, state in found.blocks:
            born = self._live[address] if state == ALLOCATED else None
            if born is not None:
                requested, allocated = requested + born.bytes, allocated + size
            blocks.append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": born.bytes if born is not None else 0,
                    "state": state,
                    "frames": self._frames_of(born) if born is not None else [],
                }
            )
            address += size
        return {
            "device": 0,
            "address": found.address,
            "total_size": found.size,
            "allocated_size": allocated,
            "active_size": allocated,
            "requested_size": requested,
            "stream": found.stream,
            "segment_type": "small" if found.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": self._expandable,
            "frames": [],
            "blocks": blocks,
        }


def _segment_entry(action: str, address: int, size: int, stream: int, time: int) -> Entry:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time, "frames": []}


def _difference(
    these: Mapping[int, tuple[int, int]], others: Mapping[int, tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """The ranges (address, size, stream) that ``these`` cover and ``others`` do not."""
    ranges = sorted((address, address + size) for address, (size, _) in others.items())
    found: list[tuple[int, int, int]] = []
    at = 0
    for address, (size, stream) in sorted(these.items()):
        start, stop = address, address + size
        while at < len(ranges) and ranges[at][1] <= start:
            at += 1
        here = at
        while start < stop:
            if here == len(ranges) or ranges[here][0] >= stop:
                found.append((start, stop - start, stream))
                break
            if ranges[here][0] > start:
                found.append((start, ranges[here][0] - start, stream))
            start = max(start, ranges[here][1])
            here += 1
    return found
