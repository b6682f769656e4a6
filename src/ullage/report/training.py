"""What the runs of a job answer, as text: a proof, a step's line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ullage.report.console import heading
from ullage.report.words import plural, settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ullage.job.job import Job
    from ullage.train.answers import Proof

_SHOWN_STEPS = 10


def proof_report(found: Proof, job: Job) -> Iterator[RenderableType]:
    """Each step on one device and on the ranks, and the differences with what they may be."""
    yield Text("EQUAL" if found.equal else "NOT EQUAL", style="bold green" if found.equal else "bold red")
    yield Text(f"{plural(found.ranks, 'rank')} against one device: {', '.join(settings(job))}")
    yield heading("Steps")
    yield _steps(found)
    yield heading("Largest relative difference")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "difference", "may be"):
        table.add_column(name, justify="right" if name else "left")
    for name, error, limit in (
        ("loss", found.loss_error, found.tolerance),
        ("gradient norm", found.norm_error, found.tolerance),
        ("final weights", found.weight_error, found.tolerance),
        ("final weights, of how far they moved", found.step_error, found.step_tolerance),
    ):
        table.add_row(name, f"{error:.1e}", f"{limit:.0e}")
    yield table


def _steps(found: Proof) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("step", "loss, one device", "loss, ranks", "norm, one device", "norm, ranks"):
        table.add_column(name, justify="right")
    rows = found.rows
    half = _SHOWN_STEPS // 2
    shown = rows if len(rows) <= _SHOWN_STEPS else (*rows[:half], *rows[-half:])
    for row in shown:
        table.add_row(
            str(row.step),
            f"{row.loss:.7f}",
            f"{row.loss_on_ranks:.7f}",
            *("" if norm is None else f"{norm:.7f}" for norm in (row.grad_norm, row.grad_norm_on_ranks)),
        )
    return table
