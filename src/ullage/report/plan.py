"""Plans for a person: the best in full, the others in a line each, and what was left out by which proof."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.report import words
from ullage.report.console import heading, indented
from ullage.report.words import in_gib

if TYPE_CHECKING:
    from ullage.planner.plan import Answer, Nothing, Plan


def plan_report(found: Answer) -> Iterator[RenderableType]:
    if found.plans:
        first = found.plans[0]
        line = Text(f" {found.goal.upper()} ", style="bold white on green")
        line.append(
            f"  {first.job.model.name} on {words.cluster(first.job)}",
            style="bold not white not black default on default",
        )
        yield line
    for one in found.plans:
        yield from _plan(one)
    if found.nothing_fits is not None:
        yield from _nothing(found.nothing_fits)
    yield heading("Searched", _searched(found))
    for engine, why in found.refused.items():
        yield indented(Text(f"- without {engine}: {why}", style="dim"))


def _plan(one: Plan) -> Iterator[RenderableType]:
    time = one.time
    yield heading(one.name, one.strategy)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    peak = one.estimate.peak
    capacity = one.estimate.capacity_bytes
    high = f"even the high estimate leaves {in_gib(capacity - peak.high_bytes)} free"
    if one.estimate.verdict == "tight":
        high = f"tight: the high estimate is {in_gib(peak.high_bytes - capacity)} above what it has"
    if one.estimate.cache_fills:
        high = words.CACHE_FILLS
    table.add_row("time", f"{time.step_s:.4g} s a step, {words.rate(time)}")
    table.add_row("memory", f"{in_gib(peak.device_bytes)} a device; {high}")
    table.add_row("limited by", one.limited_by)
    for index, reason in enumerate(one.why):
        table.add_row("why" if index == 0 else "", reason)
    yield indented(table)


def _nothing(found: Nothing) -> Iterator[RenderableType]:
    yield Text(" NOTHING FITS ", style="bold white on red")
    yield indented(Text(found.why))
    if not found.remedies:
        yield indented(Text("No single change of GPUs, sequence, offload or a fixed key makes anything fit."))
        return
    yield heading("What would fit", "each by itself")
    for one in found.remedies:
        yield indented(Text(f"- {one.what}"))


def _searched(found: Answer) -> str:
    whole = found.evaluated + found.pruned + found.infeasible
    return (
        f"{whole:,} strategies in {found.seconds:.2f} s: {found.evaluated:,} timed exactly, {found.pruned:,} proven no better, "
        f"{found.infeasible:,} proven not to fit or not to exist"
    )
