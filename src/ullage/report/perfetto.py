"""A timeline, or a pipeline's step, as a Chrome trace (JSON), which ui.perfetto.dev and chrome://tracing open.

One counter by category, one of everything, the moments as nested slices, and an instant at the peak. Format: "Trace Event
Format" (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from __future__ import annotations

from ullage.report.timeline import Timeline, samples, top
from ullage.report.words import AFTER, PASSES
from ullage.techniques.gantt import Gantt
from ullage.units import MICROSECONDS, format_bytes

MOST_SAMPLES = 20_000
MOST_LINES = 12
_PID, _TID = 1, 1

Entry = dict[str, object]


def trace(timeline: Timeline, *, title: str) -> Entry:
    """The trace as a JSON object; ``ts`` counts the timeline's own ticks."""
    categories = sorted({event.category for event in timeline.events})
    entries: list[Entry] = [
        {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": title}},
        {"ph": "M", "name": "thread_name", "pid": _PID, "tid": _TID, "args": {"name": "moments"}},
    ]
    for span in timeline.spans:
        entries.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": "moment",
                "ts": span.start,
                "dur": span.end - span.start,
                "pid": _PID,
                "tid": _TID,
            }
        )
    for sample in samples(timeline, MOST_SAMPLES):
        sizes = {category: sample.by_category.get(category, 0) for category in categories}
        entries.append(_counter("allocated bytes by category", sample.time, sizes))
        entries.append(_counter("allocated bytes", sample.time, {"bytes": sample.bytes}))
    entries.append(_peak(timeline))
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ns",
        "otherData": {"clock": "microseconds" if timeline.timed else "one tick for each allocation or free, not time"},
    }


def pipeline(gantt: Gantt, *, title: str) -> Entry:
    """The passes of each stage as slices of a thread of its own; ``ts`` counts microseconds."""
    entries: list[Entry] = [{"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": title}}]
    for stage, (slots, after_s) in enumerate(zip(gantt.ranks, gantt.after_s, strict=True)):
        entries.append(
            {"ph": "M", "name": "thread_name", "pid": _PID, "tid": stage + 1, "args": {"name": f"stage {stage}"}}
        )
        for slot in slots:
            about = {"micro_batch": slot.micro_batch, "chunk": slot.chunk}
            name = f"{slot.kind}{slot.micro_batch}"
            entries.append(_slice(name, PASSES[slot.kind], slot.start_s, slot.end_s, stage, about))
        entries.append(_slice(AFTER, "step", slots[-1].end_s, after_s, stage, {}))
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"clock": "microseconds"}}


def _slice(name: str, category: str, start_s: float, end_s: float, stage: int, about: dict[str, int]) -> Entry:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start_s * MICROSECONDS,
        "dur": (end_s - start_s) * MICROSECONDS,
        "pid": _PID,
        "tid": stage + 1,
        "args": about,
    }


def _counter(name: str, time: int, values: dict[str, int]) -> Entry:
    return {"ph": "C", "name": name, "ts": time, "pid": _PID, "args": values}


def _peak(timeline: Timeline) -> Entry:
    highest = top(timeline)
    lines = {f"{one.category}: {one.what}": one.bytes for one in reversed(highest.held[:MOST_LINES])}
    return {
        "ph": "i",
        "s": "g",
        "name": f"peak: {format_bytes(highest.bytes)}",
        "cat": "peak",
        "ts": highest.time,
        "pid": _PID,
        "tid": _TID,
        "args": {"moment": highest.moment, "allocated_bytes": highest.bytes, "largest": lines},
    }
