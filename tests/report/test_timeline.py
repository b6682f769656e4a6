"""A timeline is its program's replay with names: the same bytes at each time, the estimate's peak, spans that nest."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.jobs import job

from ullage.engines.estimate import estimate
from ullage.engines.registry import account, ranks_of
from ullage.errors import InvalidInput, Unsupported
from ullage.job.job import Job
from ullage.memory.ledger import ledger
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, events, free, locate_peak
from ullage.model.build import graph
from ullage.report import timeline_job
from ullage.report.timeline import Timeline, of_program, samples, top
from ullage.report.timeline_job import JobTimeline, job_timeline

JOBS = {
    "fsdp2": {"engine": {"name": "fsdp2", "zero_stage": 3}, "layout": {"dp": 2}, "recompute": "full"},
    "fsdp2-expandable": {
        "engine": {"name": "fsdp2", "zero_stage": 2, "options": {"expandable_segments": True}},
        "layout": {"dp": 4},
    },
    "megatron-pipeline": {"engine": {"name": "megatron", "zero_stage": 1}, "layout": {"dp": 2, "tp": 2, "pp": 2}},
    "megatron-interleaved": {
        "engine": {"name": "megatron", "zero_stage": 1},
        "layout": {"dp": 1, "tp": 1, "pp": 2, "vpp": 2, "schedule": "interleaved-1f1b"},
    },
    "deepspeed": {"engine": {"name": "deepspeed", "zero_stage": 2}, "layout": {"dp": 4}},
}


def drawn_job(name: str) -> Job:
    keys = dict(JOBS[name])
    engine = keys.pop("engine")
    assert isinstance(engine, dict)
    return job(engine, data={"seq_len": 256, "micro_batch": 1, "grad_accum": 4}, **keys)


@pytest.fixture(params=JOBS)
def drawn(request: pytest.FixtureRequest) -> JobTimeline:
    return job_timeline(drawn_job(request.param))


def replayed(program: Node) -> list[int]:
    """Live bytes after each event of a program."""
    live, found = 0, []
    for event in events(program):
        live += event.item.bytes if event.alive else -event.item.bytes
        found.append(live)
    return found


def live_by_time(timeline: Timeline) -> dict[int, int]:
    live, found = 0, {}
    for event in timeline.events:
        live += event.bytes if event.alive else -event.bytes
        found[event.time] = live
    return found


def program_of(drawn: JobTimeline) -> Node:
    one = drawn.estimate.job
    built = graph(one.model, mtp=one.engine.name == "megatron")
    return account(one, built, ranks_of(one, built)[drawn.stage.stage]).program


def without_numbers(moment: str) -> str:
    return re.sub(r", \d+ of \d+|of chunk \d+", "", moment).strip()


def test_live_bytes_are_the_replay_of_the_program(drawn: JobTimeline) -> None:
    there = live_by_time(drawn.timeline)
    live, mine = 0, []
    for time in range(drawn.timeline.end):
        live = there.get(time, live)
        mine.append(live)
    # A moment that allocates nothing takes a tick of its own, and an item of 0 bytes is no event: levels are compared, not ticks.
    assert levels(mine) == levels(replayed(program_of(drawn)))


def levels(sizes: list[int]) -> list[int]:
    return [size for before, size in zip([0, *sizes], sizes, strict=False) if size != before]


def test_the_peak_is_the_estimates(drawn: JobTimeline) -> None:
    highest = drawn.top
    assert highest.bytes == drawn.stage.allocated_bytes == drawn.estimate.peak.allocated_bytes
    assert without_numbers(highest.moment) == drawn.estimate.peak.moment
    assert [(one.category, one.what, one.bytes) for one in sorted(highest.held)] == sorted(
        (line.category, line.what, line.bytes) for line in merged(drawn)
    )


def merged(drawn: JobTimeline) -> list[Item]:
    """The ledger's lines with those of one formula together, which a line's formula says with its count."""
    totals: dict[tuple[str, str, str], int] = {}
    for item, count in locate_peak(program_of(drawn)).live.items():
        key = (item.category, item.what, item.formula)
        totals[key] = totals.get(key, 0) + item.bytes * count
    found = [
        Item(category=category, what=what, bytes=size, formula=formula)
        for (category, what, formula), size in totals.items()
        if size
    ]
    assert sum(item.bytes for item in found) == sum(line.bytes for line in ledger(locate_peak(program_of(drawn))))
    return found


def test_every_free_ends_an_allocation_of_the_same_kind(drawn: JobTimeline) -> None:
    alive = {}
    for event in drawn.timeline.events:
        if event.alive:
            assert event.handle not in alive
            alive[event.handle] = event
        else:
            born = alive.pop(event.handle)
            assert (born.bytes, born.category, born.what, born.stream) == (
                event.bytes,
                event.category,
                event.what,
                event.stream,
            )
    assert sum(event.bytes for event in alive.values()) == drawn.stage.static_bytes


def test_spans_nest_and_hold_the_events_that_they_name(drawn: JobTimeline) -> None:
    spans = drawn.timeline.spans
    open_spans: list = []
    for span in spans:
        assert 0 <= span.start < span.end <= drawn.timeline.end
        while open_spans and open_spans[-1].end <= span.start:
            open_spans.pop()
        assert span.depth == len(open_spans)
        assert not open_spans or span.end <= open_spans[-1].end
        open_spans.append(span)
    assert [event.time for event in drawn.timeline.events] == sorted(event.time for event in drawn.timeline.events)
    assert drawn.timeline.events[-1].time < drawn.timeline.end


def test_layers_and_micro_batches_are_numbered() -> None:
    names = [span.name for span in job_timeline(drawn_job("fsdp2")).timeline.spans]
    for micro_batch in range(1, 5):
        assert f"forward, micro-batch {micro_batch}" in names
    forward = [name for name in names if name.startswith("forward of layer")][:8]
    backward = [name for name in names if name.startswith("backward of layer")][:8]
    assert forward == [f"forward of layer, {number} of 8" for number in range(1, 9)]
    assert backward == [f"backward of layer, {number} of 8" for number in range(8, 0, -1)]
    assert names[0] == "load"
    assert "optimizer step" in names  # a moment that allocates nothing is seen all the same


def test_history_is_load_and_two_steps() -> None:
    drawn = job_timeline(drawn_job("fsdp2"), history=True)
    outermost = [span.name for span in drawn.timeline.spans if not span.depth]
    assert outermost == ["load", "first step", "states made by the first step", "second step"]
    assert drawn.top.bytes == drawn.estimate.peak.allocated_bytes
    first, second = (
        [span.name for span in drawn.timeline.spans if span.depth == 1 and start <= span.start < end]
        for name in ("first step", "second step")
        for start, end in [next((s.start, s.end) for s in drawn.timeline.spans if s.name == name)]
    )
    assert first == second  # numbered alike


def test_a_stage_is_chosen_and_others_are_named() -> None:
    pipeline = drawn_job("megatron-pipeline")
    for stage, rank in enumerate(estimate(pipeline).ranks):
        assert job_timeline(pipeline, stage=stage).top.bytes == rank.allocated_bytes
    with pytest.raises(InvalidInput, match=r"--rank = 2: is no pipeline stage of this job; allowed: 0 to 1"):
        job_timeline(pipeline, stage=2)


def test_what_is_too_long_to_draw_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_job, "MOST_EVENTS", 10)
    with pytest.raises(Unsupported, match="at most 10; draw it with fewer micro-batches"):
        job_timeline(drawn_job("fsdp2"))


def test_pieces_are_tensors_of_their_own() -> None:
    item = Item(category="parameters", what="weights", bytes=2560, pieces=(512, 2048))
    timeline = of_program(Sequence([alloc(item, 2), free(item)], "load"))
    assert [(event.time, event.handle, event.bytes, event.alive) for event in timeline.events] == [
        (0, 0, 512, True),
        (0, 1, 2048, True),
        (1, 2, 512, True),
        (1, 3, 2048, True),
        (2, 2, 512, False),
        (2, 3, 2048, False),
    ]


def test_an_empty_program() -> None:
    timeline = of_program(Sequence([]))
    assert timeline.events == ()
    assert top(timeline).bytes == 0
    assert samples(timeline, 10) == []


ITEMS = [
    Item(category=category, what="x", bytes=size) for category in ("activations", "transient") for size in (512, 9728)
]


@given(st.lists(st.tuples(st.sampled_from(ITEMS), st.integers(1, 4)), min_size=1, max_size=60), st.integers(2, 40))
@settings(max_examples=60)
def test_samples_keep_the_peak_the_end_and_their_number(steps: list[tuple[Item, int]], most: int) -> None:
    nodes: list[Node] = [Sequence([alloc(item, count), free(item, count - 1)]) for item, count in steps]
    timeline = of_program(Repeat(3, Sequence([*nodes, *(free(item) for item, _ in steps[::2])])))
    found = samples(timeline, most)
    every = samples(timeline, 10**9)
    assert len(found) <= most + 2
    assert max(sample.bytes for sample in found) == top(timeline).bytes == max(sample.bytes for sample in every)
    assert found[-1] == every[-1]
    assert {sample.time for sample in found} <= {sample.time for sample in every}
    assert all(sum(sample.by_category.values()) == sample.bytes for sample in found)
