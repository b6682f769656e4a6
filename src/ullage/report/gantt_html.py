"""A pipeline's step as one HTML file that needs nothing beside it: the Gantt chart as SVG, and the steps as tables."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from string import Template

from ullage.report import words
from ullage.report.page import begun
from ullage.report.show_words import cell, total
from ullage.report.words import AFTER, PASSES, share
from ullage.techniques.gantt import Gantt, Slot
from ullage.techniques.told import Part, Shown
from ullage.units import format_seconds

LEFT, RIGHT, TOP = 80, 1130, 8
"""The chart's edges, in units of its viewBox."""
TALL, LOW, TALL_STAGES = 24, 12, 32
"""Height of a stage's line, and of one of more than so many."""
MOST_TITLED = 6_000  # passes; of more each stage's are drawn as one shape, without a title of their own
LETTER = 7.0  # width of a letter in a pass
TICKS = 8


def page(shown: Shown) -> str:
    """The whole file."""
    assert shown.gantt is not None, shown.technique
    chart = shown.gantt
    job = shown.job
    height = _height(chart) * len(chart.ranks)
    return PAGE.substitute(
        title=escape(f"{job.model.name} on {words.cluster(job)}: {job.layout.schedule}, {len(chart.ranks)} stages"),
        facts=escape(" · ".join(words.settings(job))),
        span=format_seconds(chart.end_s),
        height=TOP + height + 24,
        chart="\n".join((*_axis(chart, TOP + height), *_stages(chart))),
        after=AFTER,
        halves=f'<i class="weights"></i>{PASSES["W"]}' if chart.halved else "",
        detail="" if _titled(chart) else "So many passes are drawn without their numbers.",
        tables="\n".join(_table(number, part) for number, part in enumerate(shown.parts, 1)),
        notes="".join(f"<p>{escape(note)}</p>" for note in shown.notes),
    )


def _height(chart: Gantt) -> int:
    return TALL if len(chart.ranks) <= TALL_STAGES else LOW


def _x(chart: Gantt, time_s: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * time_s / chart.end_s, 2)


def _axis(chart: Gantt, bottom: int) -> Iterator[str]:
    for tick in range(TICKS + 1):
        time_s = chart.end_s * tick / TICKS
        at = _x(chart, time_s)
        yield f'<path class="grid" d="M{at} {TOP}V{bottom}"/>'
        yield f'<text class="axis" x="{at}" y="{bottom + 16}" text-anchor="middle">{format_seconds(time_s)}</text>'


def _stages(chart: Gantt) -> Iterator[str]:
    high = _height(chart)
    titled = _titled(chart)
    for stage, slots in enumerate(chart.ranks):
        top = TOP + stage * high
        middle = top + high / 2 + 4
        yield f'<text class="axis" x="{LEFT - 8}" y="{middle}" text-anchor="end">stage {stage}</text>'
        if titled:
            for slot in slots:
                yield from _pass(chart, slot, top, high)
        else:
            yield from _shapes(chart, slots, top, high)
        start, end = _x(chart, slots[-1].end_s), _x(chart, chart.after_s[stage])
        yield f'<path class="after" d="{_box(start, end, top, high)}"><title>{AFTER}</title></path>'
        idle = share(chart.idle_share(stage), 1.0)
        yield f'<text class="axis" x="{RIGHT + 8}" y="{middle}">{idle}</text>'


def _titled(chart: Gantt) -> bool:
    return sum(map(len, chart.ranks)) <= MOST_TITLED


def _pass(chart: Gantt, slot: Slot, top: int, high: int) -> Iterator[str]:
    start, end = _x(chart, slot.start_s), _x(chart, slot.end_s)
    chunk = f", chunk {slot.chunk}" if chart.chunks > 1 else ""
    when = f"{format_seconds(slot.start_s)} to {format_seconds(slot.end_s)}"
    title = f"{PASSES[slot.kind]} of micro-batch {slot.micro_batch}{chunk}: {when}"
    shade = " odd" if slot.chunk % 2 else ""
    yield f'<path class="{_CLASSES[slot.kind]}{shade}" d="{_box(start, end, top, high)}"><title>{title}</title></path>'
    name = str(slot.micro_batch)
    if len(name) * LETTER < end - start:
        at = round((start + end) / 2, 2)
        yield f'<text class="pass" x="{at}" y="{top + high / 2 + 4}" text-anchor="middle">{name}</text>'


def _shapes(chart: Gantt, slots: tuple[Slot, ...], top: int, high: int) -> Iterator[str]:
    for kind, name in _CLASSES.items():
        boxes = (_box(_x(chart, slot.start_s), _x(chart, slot.end_s), top, high) for slot in slots if slot.kind == kind)
        if drawn := "".join(boxes):
            yield f'<path class="{name}" d="{drawn}"/>'


def _box(start: float, end: float, top: int, high: int) -> str:
    return f"M{start} {top + 1}H{end}v{high - 2}H{start}z"


def _table(number: int, part: Part) -> str:
    def row(values: list[str], tag: str = "td") -> str:
        cells = (
            f"<{tag}{'' if column.unit == 'text' else ' class=n'}>{escape(value)}</{tag}>"
            for value, column in zip(values, part.columns, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = [
        row([cell(value, column.unit) for value, column in zip(values, part.columns, strict=True)])
        for values in part.rows
    ]
    if len(part.rows) > 1 and any(column.summed for column in part.columns):
        body.append(row(total(part)))
    head = row([column.head for column in part.columns], "th")
    return (
        f"<section><h2>{number}. {escape(part.title)}</h2><p>{escape(part.about)}</p>"
        f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table></section>"
    )


_CLASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1c2128;--faint:#667080;--rule:#e3e6ea;
--forward:#9dbde3;--odd-forward:#c5d9ef;--backward:#9fd0b3;--odd-backward:#c9e6d4;--after:#d9b8d9;--weights:#e3cf9a}
@media (prefers-color-scheme:dark){:root{--page:#14171c;--ink:#e6e9ee;--faint:#98a2b0;--rule:#2b313a;
--forward:#2f5d94;--odd-forward:#234467;--backward:#2b6b49;--odd-backward:#214d36;--after:#6d3f6d;--weights:#7a6226}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:24px 20px 48px;background:var(--page);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
h1{font-size:20px;margin:0 0 2px}h2{font-size:14px;margin:22px 0 2px}
p{margin:0 0 6px;color:var(--faint)}
svg{width:100%;height:auto;display:block;margin:14px 0}
text{font:12px system-ui,sans-serif;fill:var(--ink)}
.axis{fill:var(--faint)}.grid{stroke:var(--rule);fill:none}
text.pass{font-size:11px;pointer-events:none}
.forward{fill:var(--forward)}.forward.odd{fill:var(--odd-forward)}
.backward{fill:var(--backward)}.backward.odd{fill:var(--odd-backward)}.after{fill:var(--after)}.weights{fill:var(--weights)}
i{display:inline-block;width:11px;height:11px;margin:0 5px 0 12px;border-radius:2px}
i.forward{background:var(--forward)}i.backward{background:var(--backward)}i.after{background:var(--after)}i.weights{background:var(--weights)}
section{overflow-x:auto}
table{border-collapse:collapse}td,th{padding:3px 10px 3px 0;border-bottom:1px solid var(--rule);text-align:left}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
th{font-weight:400;color:var(--faint)}
"""

PAGE = Template(f"""{begun(_STYLE)}<p>One step, $span. At the end of each line the share in which the stage waits. $detail
<i class="forward"></i>forward<i class="backward"></i>backward$halves<i class="after"></i>$after</p>
<svg viewBox="0 0 1200 $height" role="img" aria-label="The passes of each pipeline stage over time">
$chart
</svg>
$tables
<section><h2>Notes</h2>$notes</section>
</body>
</html>
""")
