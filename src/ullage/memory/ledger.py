"""The account: what a rank holds at its worst moment, line by line, adding up to the byte."""

from __future__ import annotations

from collections.abc import Iterable

from ullage.frozen import frozen
from ullage.memory.program import Item, Peak

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer",
    "activations",
    "gathered",
    "communication",
    "transient",
    "workspace",
    "input",
)


@frozen
class Line:
    """One line: ``count`` allocations of one kind. bytes: of all of them, as the allocator rounds each."""

    category: str
    what: str
    bytes: int
    count: int
    formula: str
    provenance: str
    lives: str


def ledger(peak: Peak) -> tuple[Line, ...]:
    """The lines of a peak, by category and then by size; their bytes add up to ``peak.bytes``."""
    merged: dict[tuple[str, str, str], list[tuple[Item, int]]] = {}
    for item, count in peak.live.items():
        merged.setdefault((item.category, item.what, item.formula), []).append((item, count))
    lines = [_line(items) for items in merged.values()]
    return tuple(sorted(lines, key=lambda line: (CATEGORIES.index(line.category), -line.bytes, line.what)))


def _line(items: list[tuple[Item, int]]) -> Line:
    item = items[0][0]
    count = sum(n for _, n in items)
    total = sum(one.bytes * n for one, n in items)
    formula = item.formula if count == 1 else f"{count} x ({item.formula})"
    return Line(
        category=item.category,
        what=item.what,
        bytes=total,
        count=count,
        formula=formula,
        provenance=item.provenance,
        lives=item.lives,
    )


def by_category(lines: Iterable[Line]) -> dict[str, int]:
    """Bytes of each category that has any."""
    totals = dict.fromkeys(CATEGORIES, 0)
    for line in lines:
        totals[line.category] += line.bytes
    return {category: total for category, total in totals.items() if total}
