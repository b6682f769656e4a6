"""Predicted against measured, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.report.console import heading
from ullage.report.words import error, in_unit, plural
from ullage.units import format_bytes

if TYPE_CHECKING:
    from ullage.validation.compare import Row, Validation
    from ullage.validation.coverage import Coverage
    from ullage.validation.summary import Summary

MOST_IDS = 3
UNSPECIFIED = (
    "unspecified: the source does not say which memory; held against the reserved figure, torchtune's since 2024-09-24 against the "
    "allocated one, which its tools print"
)


def validation_report(found: Validation, *, verbose: bool = False) -> Iterator[RenderableType]:
    """The summary; ``verbose``: each record first, and every reason in full."""
    if verbose:
        yield _rows(found.rows)
    estimated = len({(row.file, row.id) for row in found.rows})
    yield Text(f"{plural(found.records, 'record')}: {estimated} estimated, {len(found.unsupported)} not supported")
    yield heading("Error", "absolute, of the measured value; inside: share of measurements in the estimate's interval")
    yield _summary(found)
    if found.coverage is not None:
        yield Text(f"  {intervals(found.coverage)}", style="dim")
    yield heading("Verdicts")
    yield _verdicts(found)
    if found.unsupported:
        yield heading("Not supported")
        yield _unsupported(found, verbose)
    notes = list(found.skipped)
    if any(row.quantity == "unspecified" for row in found.rows):
        notes.append(UNSPECIFIED)
    yield Text("")
    for note in notes:
        yield Text(f"- {note}", style="dim")


def _rows(rows: Sequence[Row]) -> Table:
    table = _table(("grade", "quantity", "measured>", "predicted>", "error>", "low>", "high>", "verdict", "record"))
    for row in rows:
        if row.quantity != "fits":
            style = "" if row.covered or row.low is None else "yellow"
            ratio = Text(error(row.error_ratio or 0.0), style=style)
            sizes = [in_unit(row.quantity, value) for value in (row.measured, row.predicted)]
            bracket = ["" if bound is None else in_unit(row.quantity, bound) for bound in (row.low, row.high)]
            table.add_row(row.grade, row.quantity, *sizes, ratio, *bracket, row.verdict, Text(row.id))
        elif not row.fits:
            table.add_row(row.grade, "fits", "no", "", "", "", "", row.verdict, Text(row.id))
    return table


def _summary(found: Validation) -> Table:
    table = _table(
        ("quantity", "grade", "records>", "median>", "mean>", "nine in ten within>", "worst>", "signed>", "inside>")
    )
    for one in found.summary:
        table.add_row(*cells(one))
        if one.quantity == "allocated":
            for part in found.by_size:
                if part.grade == one.grade:
                    table.add_row(*cells(part))
    return table


def intervals(found: Coverage) -> str:
    """How often the estimates' intervals hold, and those that other sources' residuals give."""
    told = f"Intervals hold {100 * found.stated:.0f} % of {found.measurements} measurements of memory"
    if found.held_out is None:
        return f"{told}; too few for a cross-validation."
    alike = ""
    if found.mean_of_sources is not None:
        alike = f", {100 * found.mean_of_sources:.0f} % in the mean of the sources"
    return (
        f"{told}. Cross-validated: those of other sources' residuals, meant for {100 * found.nominal:.0f} %, hold "
        f"{100 * found.held_out:.0f} %{alike}."
    )


def cells(one: Summary) -> tuple[str, ...]:
    """A summary as a row: quantity, grade, records, median, mean, p90, worst, signed median, share inside the interval."""
    name = one.quantity
    if one.least_bytes:
        name += f", {format_bytes(one.least_bytes)} and more"
    elif one.below_bytes:
        name += f", below {format_bytes(one.below_bytes)}"
    ratios = (one.median, one.mean, one.p90, one.worst)
    return (
        name,
        one.grade,
        str(one.records),
        *(f"{100 * ratio:.1f} %" for ratio in ratios),
        f"{100 * one.signed_median:+.1f} %",
        "" if one.covered is None else f"{100 * one.covered:.0f} %",
    )


def _verdicts(found: Validation) -> Table:
    table = _table(("the run", "called fits>", "called tight>", "called oom>"))
    for truth, name in (("fits", "fitted"), ("oom", "ran out of memory")):
        counts = [found.verdicts[f"{truth}_called_{verdict}"] for verdict in ("fits", "tight", "oom")]
        wrong = (truth == "oom" and counts[0] > 0, False, truth == "fits" and counts[2] > 0)
        table.add_row(
            name, *(Text(str(count), style="red" if bad else "") for count, bad in zip(counts, wrong, strict=True))
        )
    return table


def _unsupported(found: Validation, verbose: bool) -> Table:
    table = _table(("records>", "why", "which"))
    for why, ids in reasons(found, short=not verbose):
        shown = ids if verbose else ids[:MOST_IDS]
        more = len(ids) - len(shown)
        table.add_row(
            str(len(ids)), Text(why), Text(", ".join(shown) + (f" and {more} more" if more else ""), style="dim")
        )
    return table


def reasons(found: Validation, *, short: bool = True) -> list[tuple[str, list[str]]]:
    """Every reason with the records that it stopped, the most frequent first; ``short``: without what would be allowed."""
    by_reason: dict[str, list[str]] = {}
    for one in found.unsupported:
        by_reason.setdefault(one.short if short else one.why, []).append(one.id)
    return sorted(by_reason.items(), key=lambda pair: (-len(pair[1]), pair[0]))


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    return table
