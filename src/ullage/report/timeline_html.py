"""A timeline as one HTML file that needs nothing beside it: memory over time, stacked by category, against the capacity.

Everything is computed and worded here; the page's script only looks up what is under the pointer. Coordinates are those of
the drawing's viewBox.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from html import escape

from ullage.memory.ledger import CATEGORIES
from ullage.report.timeline import Held, Limit, Sample, Span, Timeline, Top, samples, top
from ullage.report.timeline_page import PAGE
from ullage.report.words import in_gib, share
from ullage.units import GIB, MIB

MOST_SAMPLES = 1_600
MOST_LINES = 14
LEFT, RIGHT, TOP, BOTTOM = 76, 1180, 30, 426
"""The plot's edges."""
BAND_TOP, BAND_HEIGHT, BANDS = 436, 20, 2
"""Moments stand below the plot, one band for each of the outermost depths."""
KINDS = ("forward", "backward")  # moments with a shade of their own
NARROWEST = 0.4  # a moment narrower than this is not drawn
LETTER = 6.4  # width of a letter in a band
MOST_STEPS = 8  # lines of the grid
HEADROOM = 1.06
FARTHEST = (
    6  # a limit that is more than so many times the peak is named and not drawn, or the memory would be a flat line
)


def page(timeline: Timeline, *, title: str, facts: ListLike[str] = (), lines: ListLike[Limit] = ()) -> str:
    """The whole file. facts: short phrases under the title. lines: capacities, the hardest limit first."""
    highest = top(timeline)
    drawn = samples(timeline, MOST_SAMPLES)
    near = [line.bytes for line in lines if line.bytes <= FARTHEST * highest.bytes]
    plot = _Plot(timeline, max([highest.bytes, *near]) * HEADROOM)
    known = [*CATEGORIES, *sorted({event.category for event in timeline.events} - set(CATEGORIES))]
    categories = [name for name in known if any(name in sample.by_category for sample in drawn)]
    svg = "\n".join(
        (
            *plot.grid(),
            *plot.areas(drawn, categories, known),
            *plot.lines(lines),
            *plot.peak(highest),
            *plot.bands(timeline.spans),
        )
    )
    return PAGE.substitute(
        title=escape(title),
        facts=escape(" · ".join(facts)),
        peak=escape(f"{in_gib(highest.bytes)} in {highest.moment}" if highest.moment else in_gib(highest.bytes)),
        height=BAND_TOP + BANDS * BAND_HEIGHT + 18,
        plot=svg,
        top=TOP,
        bottom=BAND_TOP + BANDS * BAND_HEIGHT,
        legend="".join(_legend(drawn, highest, categories, known)),
        ledger="".join(_ledger(highest, known)),
        data=json.dumps(_data(plot, drawn, categories, known), separators=(",", ":")).replace("<", "\\u003c"),
    )


class _Plot:
    """Times and bytes to coordinates, and the drawing's parts."""

    def __init__(self, timeline: Timeline, most_bytes: float) -> None:
        self._end = max(1, timeline.end)
        self._timed = timeline.timed
        self._most = max(1.0, most_bytes)

    def x(self, time: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * time / self._end, 2)

    def y(self, n_bytes: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * n_bytes / self._most, 2)

    def grid(self) -> Iterator[str]:
        step = _step(self._most)
        for number in range(int(self._most // step) + 1):
            at = self.y(number * step)
            yield f'<path class="grid" d="M{LEFT} {at}H{RIGHT}"/>'
            yield f'<text class="axis" x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{_scale(number * step, step)}</text>'
        clock = "microseconds" if self._timed else "allocations and frees, in order: an account knows no time"
        yield (
            f'<text class="axis" x="{(LEFT + RIGHT) // 2}" y="{BAND_TOP + BANDS * BAND_HEIGHT + 14}" text-anchor="middle">'
            f"0 to {self._end:,} {clock}</text>"
        )

    def areas(self, drawn: ListLike[Sample], categories: ListLike[str], known: ListLike[str]) -> Iterator[str]:
        """One stepped area for each category, on top of those before it."""
        below = [0] * len(drawn)
        for category in categories:
            above = [base + sample.by_category.get(category, 0) for base, sample in zip(below, drawn, strict=True)]
            if drawn:
                path = f"{self._steps(drawn, above)}{self._back(drawn, below)}Z"
                yield f'<path class="c{known.index(category)}" d="{path}"><title>{escape(category)}</title></path>'
            below = above

    def _steps(self, drawn: ListLike[Sample], sizes: ListLike[int]) -> str:
        parts = [f"M{self.x(drawn[0].time)} {self.y(sizes[0])}"]
        at = self.y(sizes[0])
        for sample, size in zip(drawn[1:], sizes[1:], strict=True):
            if (new := self.y(size)) != at:
                parts.append(f"H{self.x(sample.time)}V{new}")
                at = new
        return "".join((*parts, f"H{self.x(self._end)}"))

    def _back(self, drawn: ListLike[Sample], sizes: ListLike[int]) -> str:
        at = self.y(sizes[-1])
        parts = [f"V{at}"]
        for before, sample in zip(reversed(sizes[:-1]), reversed(drawn[1:]), strict=True):
            if (new := self.y(before)) != at:
                parts.append(f"H{self.x(sample.time)}V{new}")
                at = new
        return "".join((*parts, f"H{self.x(drawn[0].time)}"))

    def lines(self, found: ListLike[Limit]) -> Iterator[str]:
        """Capacity lines; the first one's words stand above it, the others' below theirs."""
        for number, line in enumerate(found):
            at = self.y(line.bytes)
            words = escape(f"{in_gib(line.bytes)} {line.what}")
            if line.bytes > self._most:
                yield f'<text class="note" x="{LEFT + 8}" y="{TOP - 10 + number * 15}">↑ {words}, beyond this picture</text>'
                continue
            kind = "limit" if not number else "limit soft"
            yield f'<path class="{kind}" d="M{LEFT} {at}H{RIGHT}"/>'
            yield f'<text class="note" x="{LEFT + 8}" y="{round(at + (15 if number else -6), 2)}">{words}</text>'

    def peak(self, highest: Top) -> Iterator[str]:
        at, level = self.x(highest.time), self.y(highest.bytes)
        side, shift = ("end", -9) if at > (LEFT + RIGHT) / 2 else ("start", 9)
        words = escape(f"peak {in_gib(highest.bytes)}, {highest.moment}")
        yield f'<path class="peak" d="M{at} {level}V{BOTTOM}"/><circle class="peak" cx="{at}" cy="{level}" r="4"/>'
        yield f'<text class="note strong" x="{at + shift}" y="{level - 7}" text-anchor="{side}">{words}</text>'

    def bands(self, spans: ListLike[Span]) -> Iterator[str]:
        for span in spans:
            if span.depth >= BANDS:
                continue
            start = self.x(span.start)
            width = round(self.x(span.end) - start, 2)
            if width < NARROWEST:
                continue
            at = BAND_TOP + span.depth * BAND_HEIGHT
            name = escape(span.name)
            kind = span.name.partition(" ")[0].rstrip(",")
            yield (
                f'<rect class="band {kind if kind in KINDS else "other"}" x="{start}" y="{at}" width="{width}" height="{BAND_HEIGHT - 2}">'
                f"<title>{name}</title></rect>"
            )
            short = span.name.partition(",")[0]
            words = next((words for words in (span.name, short) if len(words) * LETTER < width), "")
            if words:
                yield f'<text class="band" x="{start + 4}" y="{at + 13}">{escape(words)}</text>'


def _step(most_bytes: float) -> int:
    """The distance of the grid's lines: 1, 2 or 5 times a power of ten of GiB, or of MiB."""
    unit = GIB if most_bytes >= GIB else MIB
    step = unit
    while True:
        for times in (1, 2, 5):
            if most_bytes <= times * step * MOST_STEPS:
                return times * step
        step *= 10


def _scale(n_bytes: int, step: int) -> str:
    return f"{n_bytes // GIB} GiB" if step >= GIB else f"{n_bytes // MIB} MiB"


def _swatch(category: str, known: ListLike[str]) -> str:
    return f'<i class="swatch s{known.index(category)}"></i>'


def _legend(drawn: ListLike[Sample], highest: Top, categories: ListLike[str], known: ListLike[str]) -> Iterator[str]:
    """Each category at the peak and at its own highest, the top of the stack first."""
    for category in reversed(categories):
        there = sum(one.bytes for one in highest.held if one.category == category)
        most = max(sample.by_category.get(category, 0) for sample in drawn)
        yield (
            f"<tr><td>{_swatch(category, known)}{escape(category)}</td><td>{in_gib(there)}</td>"
            f"<td>{share(there, highest.bytes)}</td><td>{in_gib(most)}</td></tr>"
        )


def _ledger(highest: Top, known: ListLike[str]) -> Iterator[str]:
    shown: ListLike[Held] = highest.held[:MOST_LINES]
    for one in shown:
        yield (
            f'<tr title="{escape(one.detail)}"><td>{_swatch(one.category, known)}{escape(one.what)}</td>'
            f"<td>{in_gib(one.bytes)}</td><td>{share(one.bytes, highest.bytes)}</td></tr>"
        )
    rest = highest.bytes - sum(one.bytes for one in shown)
    if rest:
        count = len(highest.held) - len(shown)
        yield f"<tr><td>{count} others</td><td>{in_gib(rest)}</td><td>{share(rest, highest.bytes)}</td></tr>"


def _data(plot: _Plot, drawn: ListLike[Sample], categories: ListLike[str], known: ListLike[str]) -> dict[str, object]:
    """What the pointer finds: for each sample its place, moment, total, and the words of each category."""
    moments = list(dict.fromkeys(sample.moment for sample in drawn))
    place = {moment: number for number, moment in enumerate(moments)}
    return {
        "x": [plot.x(sample.time) for sample in drawn],
        "y": [plot.y(sample.bytes) for sample in drawn],
        "moment": [place[sample.moment] for sample in drawn],
        "moments": moments,
        "total": [in_gib(sample.bytes) for sample in drawn],
        "categories": [[known.index(name), name] for name in reversed(categories)],
        "rows": [
            [in_gib(sample.by_category[name]) if name in sample.by_category else "" for name in reversed(categories)]
            for sample in drawn
        ],
    }
