"""A pipeline's step as lines of text, one a stage, scaled to the width that there is.

Where the shortest pass has a cell of its own, each pass is written with its micro-batch; where it has none, a cell says what its time
was mostly spent on, and the heading says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from ullage.report.console import heading, indented
from ullage.report.words import AFTER, PASSES, share
from ullage.techniques.gantt import Gantt, Slot
from ullage.units import format_seconds

STYLES = {
    "F": "white on blue",
    "B": "black on green",
    "I": "black on green",
    "W": "black on yellow",
    "o": "magenta",
    "x": "black on cyan",
}
_FILLS = {"F": "─", "B": "═", "I": "═", "W": "┄"}
_ASCII_FILLS = {"F": "-", "B": "=", "I": "=", "W": "~"}
MOST_LINES = 64
LEAST_SHARE = 0.1  # of a cell's time, or of its passes: less is not told of
_FAINT = ("·", ".")  # where there are more letters than ASCII's, and where not
_IDLE_WIDTH = len(" 100 %")


def chart(gantt: Gantt, *, width: int, ascii_only: bool) -> Iterator[RenderableType]:
    """A heading and a line for each stage, none wider than ``width``."""
    stages = _drawn(len(gantt.ranks))
    labels = [f"  stage {stage} " for stage in stages]
    cells = max(10, width - max(map(len, labels)) - _IDLE_WIDTH)
    cell_s = gantt.end_s / cells
    shortest = min(slot.end_s - slot.start_s for slots in gantt.ranks for slot in slots)
    whole = shortest >= cell_s
    yield heading(
        "Gantt chart", f"{format_seconds(gantt.end_s)}, a line for each stage, at its end how much of it waits"
    )
    yield indented(Text(_legend(gantt, whole, cell_s, shortest, _FAINT[ascii_only]), style="dim"))
    if len(stages) < len(gantt.ranks):
        yield Text(f"  {len(stages)} of {len(gantt.ranks)} stages are drawn.", style="dim")
    for label, stage in zip(labels, stages, strict=True):
        line = Text(label.rjust(max(map(len, labels))), no_wrap=True)
        line.append_text((_passes if whole else _folded)(gantt, stage, cells, ascii_only))
        line.append(share(gantt.idle_share(stage), 1.0).rjust(_IDLE_WIDTH), style="dim")
        yield line


def _drawn(stages: int) -> Sequence[int]:
    """At most MOST_LINES stages, evenly, the first and the last among them."""
    if stages <= MOST_LINES:
        return range(stages)
    return [round(line * (stages - 1) / (MOST_LINES - 1)) for line in range(MOST_LINES)]


def _legend(gantt: Gantt, whole: bool, cell_s: float, shortest_s: float, faint: str) -> str:
    passes = "F forward, B backward"
    if gantt.halved:
        passes += f", I {PASSES['I']}, W {PASSES['W']}"
    if whole:
        return f"{passes}, each with its micro-batch, o {AFTER}."
    most = math.ceil(cell_s / shortest_s)
    return (
        f"Folded: a cell is {format_seconds(cell_s)}, up to {most} passes: {passes}, x {'several' if gantt.halved else 'both'}, "
        f"{faint} waits more than it runs, blank waits, o {AFTER}."
    )


def _passes(gantt: Gantt, stage: int, cells: int, ascii_only: bool) -> Text:
    """Each pass as F or B, its micro-batch and a fill, as long as it takes."""
    fills = _ASCII_FILLS if ascii_only else _FILLS
    line, at = Text(), 0
    for slot in gantt.ranks[stage]:
        start, end = _cell(slot.start_s, gantt, cells), _cell(slot.end_s, gantt, cells)
        line.append(" " * (start - at))
        line.append(_named(slot, end - start).ljust(end - start, fills[slot.kind]), style=STYLES[slot.kind])
        at = end
    return _ended(line, at, gantt, stage, cells)


def _named(slot: Slot, width: int) -> str:
    """As many of the last digits of the micro-batch as there is room for."""
    digits = str(slot.micro_batch)
    return f"{slot.kind}{digits[max(0, len(digits) - width + 1) :]}" if width > 1 else slot.kind


def _folded(gantt: Gantt, stage: int, cells: int, ascii_only: bool) -> Text:
    """Each cell by what most of its time was spent on."""
    spent = [dict.fromkeys("FBIW", 0.0) for _ in range(cells)]
    cell_s = gantt.end_s / cells
    for slot in gantt.ranks[stage]:
        first, last = int(slot.start_s / cell_s), min(cells - 1, int(slot.end_s / cell_s))
        for at in range(first, last + 1):
            inside = min(slot.end_s, (at + 1) * cell_s) - max(slot.start_s, at * cell_s)
            spent[at][slot.kind] += max(0.0, inside)
    line = Text()
    end = _cell(gantt.ranks[stage][-1].end_s, gantt, cells)
    for cell in spent[:end]:
        busy = sum(cell.values())
        kinds = [kind for kind, time_s in cell.items() if time_s > LEAST_SHARE * busy]
        mark = kinds[0] if len(kinds) == 1 else "x"
        if busy < cell_s / 2:
            mark = " " if busy < LEAST_SHARE * cell_s else _FAINT[ascii_only]
        line.append(mark, style=STYLES.get(mark, ""))
    return _ended(line, end, gantt, stage, cells)


def _ended(line: Text, at: int, gantt: Gantt, stage: int, cells: int) -> Text:
    after = _cell(gantt.after_s[stage], gantt, cells)
    line.append("o" * (after - at), style=STYLES["o"])
    line.append(" " * (cells - after))
    return line


def _cell(time_s: float, gantt: Gantt, cells: int) -> int:
    return math.floor(cells * time_s / gantt.end_s + 0.5)
