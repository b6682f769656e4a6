"""The files that a timeline becomes: what their readers demand of them, and that they say what the timeline says."""

from __future__ import annotations

import json
import pickle
import pickletools

import pytest
from tests.report.test_timeline import JOBS, drawn_job

from ullage.memory.ledger import CATEGORIES
from ullage.postmortem.snapshot import summarise
from ullage.postmortem.snapshot_compare import compare
from ullage.postmortem.snapshot_pickle import loads
from ullage.report import memory_viz, perfetto
from ullage.report.timeline import Timeline, TimelineEvent, top
from ullage.report.timeline_job import JobTimeline, job_timeline, picture_of
from ullage.report.timeline_picture import draw
from ullage.units import GIB, MIB

# What MemoryViz.js of torch 2.13 can read (function unpickle).
OPCODES_OF_THE_PAGE = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST",
    "DICT", "SETITEM",
}  # fmt: skip


@pytest.fixture(params=JOBS, scope="module")
def drawn(request: pytest.FixtureRequest) -> JobTimeline:
    return job_timeline(drawn_job(request.param), history=True)


@pytest.fixture(scope="module")
def snapshot(drawn: JobTimeline) -> dict:
    return memory_viz.snapshot(drawn.timeline, expandable_segments=drawn.expandable_segments)


# -- a memory snapshot


def test_a_snapshot_is_read_back_as_it_was_written(drawn: JobTimeline, snapshot: dict) -> None:
    data = memory_viz.dumps(snapshot)
    assert loads(data) == pickle.loads(data) == snapshot
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= OPCODES_OF_THE_PAGE


def test_blocks_fill_their_segments_and_segments_do_not_overlap(snapshot: dict) -> None:
    end = 0
    for segment in snapshot["segments"]:
        assert segment["address"] >= end
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert 0 <= block["requested_size"] <= block["size"]
            assert bool(block["frames"]) == (block["state"] == "active_allocated")
            at += block["size"]
        end = at
        assert end == segment["address"] + segment["total_size"]
        assert segment["requested_size"] == sum(block["requested_size"] for block in segment["blocks"])


def test_allocations_lie_in_reserved_memory_and_overlap_nothing(snapshot: dict) -> None:
    """The trace forward: every block within memory that was reserved before it, no byte given twice, every free has its block."""
    reserved: dict[int, int] = {}
    live: dict[int, int] = {}
    for event in snapshot["device_traces"][0]:
        address, size = event["addr"], event["size"]
        if event["action"] in ("segment_alloc", "segment_map"):
            reserved[address] = size
        elif event["action"] == "alloc":
            assert address not in live
            assert not any(at < address + size and address < at + held for at, held in near(live, address))
            assert covered(address, size, reserved)
            live[address] = size
        elif event["action"] == "free_requested":
            assert live[address] == size
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
        else:
            assert event["action"] in ("segment_free", "segment_unmap", "snapshot")
    held = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert live == held


def near(live: dict[int, int], address: int) -> list[tuple[int, int]]:
    return [pair for pair in live.items() if abs(pair[0] - address) < GIB]


def covered(address: int, size: int, reserved: dict[int, int]) -> bool:
    """Whether ranges that were mapped one by one hold the whole of a block."""
    while size > 0:
        found = next(((at, held) for at, held in reserved.items() if at <= address < at + held), None)
        if found is None:
            return False
        step = min(size, found[0] + found[1] - address)
        address, size = address + step, size - step
    return True


def test_the_page_can_walk_the_trace_backwards(snapshot: dict) -> None:
    """As simulate_memory of MemoryViz.js does: from the segments at the end to nothing at the start."""
    ranges = {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
    for event in reversed(snapshot["device_traces"][0]):
        address, size = event["addr"], event["size"]
        if event["action"] == "segment_alloc":
            assert ranges.pop(address) == size
        elif event["action"] == "segment_free":
            ranges[address] = size
        elif event["action"] == "segment_map":
            inside = next(at for at, held in ranges.items() if at <= address and address + size <= at + held)
            held = ranges.pop(inside)
            if inside < address:
                ranges[inside] = address - inside
            if address + size < inside + held:
                ranges[address + size] = inside + held - address - size
    assert ranges == {}


def test_live_bytes_of_the_trace_are_the_timelines(drawn: JobTimeline, snapshot: dict) -> None:
    mine: dict[int, int] = {}
    live = most = 0
    for event in snapshot["device_traces"][0]:
        live += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        mine[event["time_us"]] = live
        most = max(most, live)
    theirs: dict[int, int] = {}
    live = 0
    for event in drawn.timeline.events:
        live += event.bytes if event.alive else -event.bytes
        theirs[event.time] = live
    assert {time: size for time, size in mine.items() if time in theirs} == theirs
    assert most == drawn.top.bytes == drawn.estimate.peak.allocated_bytes


def test_every_block_is_named(snapshot: dict) -> None:
    for event in snapshot["device_traces"][0]:
        if event["action"] in ("alloc", "free_requested", "free_completed"):
            frames = event["frames"]
            assert frames[0]["filename"] == event["category"] in CATEGORIES
            assert all(isinstance(frame["line"], int) and frame["name"] for frame in frames)
            assert frames[-1]["filename"] == "moment"
    # annotate_snapshot of MemoryViz.js misspells what it does where no event is of this category, and fails
    assert "unknown" in {event.get("category") for event in snapshot["device_traces"][0]}


def test_annotations_open_and_close_the_moments(drawn: JobTimeline, snapshot: dict) -> None:
    open_names: list[str] = []
    for mark in snapshot["external_annotations"]:
        if mark["stage"] == "START":
            open_names.append(mark["name"])
        else:
            assert open_names.pop() == mark["name"]
    assert not open_names
    assert len(snapshot["external_annotations"]) == 2 * len(drawn.timeline.spans)


def test_expandable_segments_are_mapped(drawn: JobTimeline, snapshot: dict) -> None:
    actions = {event["action"] for event in snapshot["device_traces"][0]}
    assert ("segment_map" in actions) == drawn.expandable_segments == (not {"segment_alloc"} & actions)
    assert all(segment["is_expandable"] == drawn.expandable_segments for segment in snapshot["segments"])


@pytest.mark.parametrize("expandable", [False, True])
def test_a_full_device_gives_back_segments_in_the_trace(expandable: bool) -> None:
    """30 MiB and 40 MiB come and go, 60 MiB follow on a device of 100 MiB: what is cached goes back first."""
    sizes = (30, 40, 60)
    events = []
    for handle, size in enumerate(sizes):
        event = TimelineEvent(2 * handle, handle, size * MIB, True, "activations", "x", "forward")
        events += [event, event._replace(time=2 * handle + 1, alive=False)] if handle < 2 else [event]
    # two live at once, so that the second cannot take the first one's place
    events[1], events[2] = events[2]._replace(time=1), events[1]._replace(time=2)
    found = memory_viz.snapshot(
        Timeline(events=tuple(events), end=6), expandable_segments=expandable, capacity_bytes=100 * MIB
    )
    given = sum(
        event["size"] for event in found["device_traces"][0] if event["action"] in ("segment_alloc", "segment_map")
    )
    back = sum(
        event["size"] for event in found["device_traces"][0] if event["action"] in ("segment_free", "segment_unmap")
    )
    assert given - back == sum(segment["total_size"] for segment in found["segments"]) <= 100 * MIB
    assert back > 0 or expandable
    test_the_page_can_walk_the_trace_backwards(found)
    test_allocations_lie_in_reserved_memory_and_overlap_nothing(found)


def test_a_written_snapshot_compares_with_its_own_estimate_to_the_byte(drawn: JobTimeline, snapshot: dict) -> None:
    found = compare(snapshot, drawn.estimate, stage=drawn.stage.stage)
    for line in found.lines:
        assert line.between_bytes == line.held_bytes - excess(found.summary.held, line.category)
        assert line.peak_bytes == line.most_bytes - excess(found.summary.at_peak, line.category)
        assert line.held_by_size_bytes == line.most_by_size_bytes == 0
    assert summarise(snapshot).reserved_bytes >= found.summary.allocated_bytes


def excess(held: tuple, category: str) -> int:
    """What blocks are larger than asked: a remainder that is too small to split off goes with its block."""
    return sum(one.bytes - one.requested_bytes for one in held if one.category == category)


# -- a Chrome trace


def test_a_trace_is_json_with_counters_slices_and_the_peak(drawn: JobTimeline) -> None:
    found = json.loads(draw(picture_of(drawn), "perfetto"))["traceEvents"]
    slices = [event for event in found if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [
        (span.name, span.start, span.end - span.start) for span in drawn.timeline.spans
    ]
    totals = [event for event in found if event["ph"] == "C" and event["name"] == "allocated bytes"]
    split = [event for event in found if event["ph"] == "C" and event["name"] == "allocated bytes by category"]
    assert max(event["args"]["bytes"] for event in totals) == drawn.top.bytes
    assert [sum(event["args"].values()) for event in split] == [event["args"]["bytes"] for event in totals]
    (peak,) = [event for event in found if event["ph"] == "i"]
    assert (peak["ts"], peak["args"]["allocated_bytes"], peak["args"]["moment"]) == (
        drawn.top.time,
        drawn.top.bytes,
        drawn.top.moment,
    )


def test_a_long_timeline_is_sampled(drawn: JobTimeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "MOST_SAMPLES", 50)
    found = perfetto.trace(drawn.timeline, title="x")["traceEvents"]
    totals = [event["args"]["bytes"] for event in found if event["name"] == "allocated bytes"]
    assert len(totals) <= 52
    assert max(totals) == drawn.top.bytes


def test_an_empty_timeline_has_a_trace_and_a_snapshot() -> None:
    nothing = Timeline(events=(), end=0)
    assert json.dumps(perfetto.trace(nothing, title="nothing"))
    assert loads(memory_viz.dumps(memory_viz.snapshot(nothing)))["segments"] == []
    assert top(nothing).held == ()
