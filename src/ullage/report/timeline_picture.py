"""A timeline as a file: a page, a Perfetto trace, or a snapshot for torch's own viewer."""

from __future__ import annotations

import json
from pathlib import Path

from ullage.errors import InvalidInput
from ullage.frozen import frozen
from ullage.report.timeline import Limit, Timeline

FORMATS = {
    "html": "one file with everything in it: memory by category against the capacity",
    "perfetto": "a trace for ui.perfetto.dev or chrome://tracing",
    "memory-viz": "a snapshot for python -m torch.cuda._memory_viz or pytorch.org/memory_viz",
}


@frozen
class Picture:
    """A timeline with what frames it. limits: the hardest first. allocator_bytes: what the caching allocator may have, None: no limit."""

    timeline: Timeline
    title: str
    facts: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    expandable_segments: bool = False
    allocator_bytes: int | None = None


def draw(picture: Picture, form: str) -> bytes:
    """The file of a picture, in one of FORMATS."""
    if form == "memory-viz":
        from ullage.report import memory_viz

        return memory_viz.dumps(
            memory_viz.snapshot(
                picture.timeline,
                expandable_segments=picture.expandable_segments,
                capacity_bytes=picture.allocator_bytes,
            )
        )
    if form == "perfetto":
        from ullage.report import perfetto

        return json.dumps(perfetto.trace(picture.timeline, title=picture.title), separators=(",", ":")).encode()
    from ullage.report.timeline_html import page

    assert form == "html", form
    return page(picture.timeline, title=picture.title, facts=picture.facts, lines=picture.limits).encode()


def save(picture: Picture, form: str, out: Path) -> None:
    """Raises InvalidInput where the file cannot be written."""
    data = draw(picture, form)
    try:
        out.write_bytes(data)
    except OSError as error:
        raise InvalidInput("cannot be written", key="--out", value=str(out), remedy=error.strerror) from None
