"""``--explain``: every line of the account with its formula, its source and its life, and what the states come to by hand."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.engines.estimate import Estimate
from ullage.memory.ledger import CATEGORIES, Line, by_category
from ullage.report import words
from ullage.report.console import PLAIN_WIDTH, heading, indented
from ullage.report.terminal import foot, head, outside
from ullage.report.terminal import stages as stage_bars
from ullage.report.words import in_gib, share
from ullage.techniques.states import States, states
from ullage.units import gb

PROVENANCE = {
    "exact": "follows from the code that runs",
    "measured": "measured on this kind of device",
    "default": "a guess, which widens the interval",
}


def explained_report(
    estimate: Estimate, *, width: int = PLAIN_WIDTH, ascii_only: bool = False
) -> Iterator[RenderableType]:
    """The report of terminal.py with every line of the account spelled out."""
    yield from head(estimate, width)
    yield from stage_bars(estimate, width=width, ascii_only=ascii_only)
    yield from _derivation(estimate)
    yield from _ledger(estimate)
    yield from outside(estimate)
    yield from foot(estimate, width)


def _ledger(estimate: Estimate) -> Iterator[RenderableType]:
    whole = estimate.peak.allocated_bytes
    yield heading("Account at the peak", "; ".join(f"{name}: {meaning}" for name, meaning in PROVENANCE.items()))
    totals = by_category(estimate.ledger)
    for category in CATEGORIES:
        if category not in totals:
            continue
        total = totals[category]
        yield Text(f"\n  {category}: {in_gib(total)}, {share(total, whole)}", style="bold")
        for line in estimate.ledger:
            if line.category == category:
                yield from _line(line)
    yield Text(f"\n  allocated: {whole:,} bytes, the sum of all lines", style="bold")


def _line(line: Line) -> Iterator[RenderableType]:
    name = Text(words.named(line))
    name.append(f"   {line.bytes:,} bytes, {in_gib(line.bytes)}", style="cyan")
    yield indented(name, 4)
    details = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    details.add_column(no_wrap=True)
    details.add_column(overflow="fold")
    for what, text in (("formula", line.formula), ("lives", line.lives), ("source", line.provenance)):
        details.add_row(Text(what, style="dim"), Text(text or "not stated", style="dim"))
    yield indented(details, 8)


def _derivation(estimate: Estimate) -> Iterator[RenderableType]:
    found = states(estimate.job, words.worst(estimate).stage)
    if not found:
        return
    yield heading("States by hand", "bytes of each parameter, before rounding, buckets and gathered copies")
    for kind in found:
        which = "" if kind.kind == "all" else f" ({kind.kind})"
        yield indented(
            Text(f"{kind.parameters:,} parameters{which} on each of {words.ranks([words.worst(estimate).ranks])}")
        )
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for state in kind.states:
            sharded = f" / {state.shards} ranks" if state.shards > 1 else ""
            size = float(kind.parameters * state.per_parameter)
            table.add_row(Text(state.what), Text(f"{_number(Fraction(state.bits, 8))} B{sharded}"), Text(_both(size)))
        table.add_row(
            Text("together", style="bold"),
            Text(f"{in_words(kind)} B", style="bold"),
            Text(_both(kind.bytes), style="bold"),
        )
        if kind.bytes != kind.unsharded_bytes:
            whole = sum(Fraction(state.bits, 8) for state in kind.states)
            table.add_row(Text("unsharded"), Text(f"{_number(Fraction(whole))} B"), Text(_both(kind.unsharded_bytes)))
        yield indented(table, 4)
    totals = by_category(estimate.ledger)
    held = ", ".join(f"{name} {in_gib(totals.get(name, 0))}" for name in ("parameters", "gradients", "optimizer"))
    yield indented(Text(f"In the account at the peak: {held}.", style="dim"))


def in_words(kind: States) -> str:
    """``2 + 4 + 12 / 8 = 7.5``: states of one role and division are one term."""
    terms: dict[tuple[str, int], int] = {}
    for state in kind.states:
        terms[state.role, state.shards] = terms.get((state.role, state.shards), 0) + state.bits
    written = " + ".join(_term(Fraction(bits, 8), shards) for (_, shards), bits in terms.items())
    return f"{written} = {_number(sum((state.per_parameter for state in kind.states), Fraction(0)))}"


def _term(size: Fraction, shards: int) -> str:
    return f"{_number(size)} / {shards}" if shards > 1 else _number(size)


def _number(value: Fraction) -> str:
    return f"{float(value):.4g}"


def _both(n_bytes: float) -> str:
    """In both units, since both are in use: 112 GB is 104.31 GiB."""
    return f"{gb(n_bytes):,.2f} GB = {in_gib(n_bytes)}"
