"""The timeline of a trace: every allocation by the module and op that made it, the phases of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ullage.report.timeline import Span, Timeline, TimelineEvent
from ullage.report.timeline_picture import Picture
from ullage.report.words import plural

if TYPE_CHECKING:
    from ullage.trace.events import Allocation, Trace


def picture_of_trace(trace: Trace) -> Picture:
    """What is drawn of a trace, from the building of the model on."""
    world = f", rank {trace.rank} of {trace.world}" if trace.world > 1 else ""
    return Picture(
        timeline=of_trace(trace),
        title=f"{trace.name}{world}: load and {plural(trace.steps, 'step')}, traced",
        facts=("every allocation of the code that ran", *trace.notes),
    )


def of_trace(trace: Trace) -> Timeline:
    """A trace as a timeline; its clock is the trace's, which counts allocations and frees."""
    happened = sorted(_events(trace), key=lambda event: event.time)
    return Timeline(events=tuple(happened), spans=tuple(_spans(trace)), end=trace.end)


def _events(trace: Trace) -> Iterator[TimelineEvent]:
    for handle, one in enumerate(trace.allocations):
        for time, alive in ((one.birth, True), (one.death, False)):
            if time is not None:
                yield TimelineEvent(
                    time=time,
                    handle=handle,
                    bytes=one.bytes,
                    alive=alive,
                    category=one.category,
                    what=_what(one),
                    moment=f"{trace.phase(time)}{f', {one.module}' if alive and one.module else ''}",
                    stream=one.stream,
                    detail=f"{' x '.join(map(str, one.shape)) or '1'} {one.dtype}",
                )


def _what(one: Allocation) -> str:
    made = f"{one.module or '(root)'}: {one.op}" if one.op else one.module
    return f"{one.name} ({made})" if one.name and made else one.name or made


def _spans(trace: Trace) -> Iterator[Span]:
    """Steps, and in each its phases."""
    ends = [*(mark.at for mark in trace.marks[1:]), trace.end]
    for step in range(trace.steps + 1):
        phases = [(mark, end) for mark, end in zip(trace.marks, ends, strict=True) if mark.step == step]
        if not phases:
            continue
        yield Span(f"step {step}" if step else "load", phases[0][0].at, phases[-1][1], 0)
        if step:
            yield from (Span(mark.what, mark.at, end, 1) for mark, end in phases if end > mark.at)
