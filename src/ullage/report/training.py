"""What the runs of a job answer, as text: a proof, what was measured, a training and each of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ullage.report.console import heading
from ullage.report.words import error, in_gib, plural, settings
from ullage.units import format_bytes, mib

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ullage.job.job import Job
    from ullage.train.answers import Measured, Proof, Step, Trained

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
    for name, gap, limit in (
        ("loss", found.loss_error, found.tolerance),
        ("gradient norm", found.norm_error, found.drift_tolerance),
        ("final weights", found.weight_error, found.drift_tolerance),
        ("final weights, of how far they moved", found.step_error, found.step_tolerance),
    ):
        table.add_row(name, f"{gap:.1e}", f"{limit:.0e}")
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


def measured_report(found: Measured, job: Job) -> Iterator[RenderableType]:
    """The rank that held most against the estimate, category by category, and each rank's figures."""
    share = f"{error(found.error)} off, {100 * found.bound:.0f} % may be"
    yield Text(
        f"{'WITHIN' if found.within else 'NOT WITHIN'}  {share}", style="bold green" if found.within else "bold red"
    )
    yield Text(
        f"{plural(len(found.ranks), 'rank')}, {found.device}, {', '.join(found.versions)}: {', '.join(settings(job))}"
    )
    yield heading("Allocated at the highest moment of a steady step", "MiB")
    yield _categories(found)
    yield Text(f"predicted: {found.predicted_moment}")
    if found.worst.moment:
        yield Text(f"measured: rank {found.worst.rank}, {found.worst.moment}")
    yield heading("Ranks", "MiB")
    yield _ranks(found)
    yield Text(f"\n{found.step_s:.3f} s a step, {found.tokens_per_s_per_rank:,.0f} tokens/s a rank{_against(found)}")


def _against(found: Measured) -> str:
    if found.predicted_step_s is None:
        return ""
    return f"; {found.predicted_step_s:.3f} s predicted, {found.predicted_step_s / found.step_s:.2f} of measured"


def _categories(found: Measured) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "predicted", "measured"):
        table.add_column(name, justify="right" if name else "left")
    predicted, measured = dict(found.predicted), dict(found.worst.categories)
    if measured:
        for category in {**predicted, **measured}:
            table.add_row(category, *(f"{mib(one.get(category, 0)):,.3f}" for one in (predicted, measured)))
    table.add_row("in all", f"{mib(found.predicted_bytes):,.3f}", f"{mib(found.worst.allocated_bytes):,.3f}")
    return table


def _ranks(found: Measured) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "allocated", "reserved", "device"):
        table.add_column(name, justify="right")
    for one in found.ranks:
        sizes = (one.allocated_bytes, one.reserved_bytes, one.device_bytes)
        table.add_row(str(one.rank), *("" if size is None else f"{mib(size):,.3f}" for size in sizes))
    return table


def step_line(step: Step, predicted_bytes: int | None, capacity_bytes: int) -> str:
    """``step 12/500  loss 3.1416  1,234 tokens/s  MFU 41.0 %  41.20 GiB allocated (42.03 GiB predicted, 79.11 GiB there)``."""
    parts = [
        f"step {step.step:,}/{step.steps:,}",
        f"loss {_loss(step)}" + (" (skipped: fp16 overflow)" if step.skipped else ""),
        f"{step.tokens_per_s:,.0f} tokens/s",
    ]
    if step.mfu is not None:
        parts.append(f"MFU {100 * step.mfu:.1f} %")
    return "  ".join([*parts, _memory(step.memory_bytes, step.reserved_bytes is None, predicted_bytes, capacity_bytes)])


def _loss(step: Step) -> str:
    return "no number" if step.loss is None else f"{step.loss:.4f}"


def _memory(used: int, resident: bool, predicted: int | None, capacity: int) -> str:
    """What a GPU's allocator held against the prediction and the card; of a process on the CPU, its size."""
    expected = "no prediction" if predicted is None else f"{format_bytes(predicted)} predicted"
    if resident:
        return f"{format_bytes(used)} resident (on the job's GPU {expected} of {in_gib(capacity)})"
    return f"{format_bytes(used)} allocated ({expected}, {in_gib(capacity)} there)"


def trained_report(found: Trained, job: Job) -> Iterator[RenderableType]:
    """How far it came, and where what it wrote is."""
    first, last = found.first, found.last
    if first is None or last is None:
        yield Text(f"NOTHING LEFT TO DO  step {found.resumed:,} was the last", style="bold green")
    else:
        since = f", from step {found.resumed:,}" if found.resumed else ""
        yield Text(
            f"TRAINED  {plural(last.step, 'step')}{since}, loss {_loss(first)} to {_loss(last)}", style="bold green"
        )
    yield Text(
        f"{plural(found.ranks, 'rank')}, {found.device}, {', '.join(found.versions)}: {', '.join(settings(job))}"
    )
    if last is not None and found.step_s is not None and found.memory_bytes is not None:
        speed = f"{found.step_s:.3f} s a step, {last.tokens_per_s * last.step_s / found.step_s:,.0f} tokens/s"
        memory = _memory(found.memory_bytes, last.reserved_bytes is None, found.predicted_bytes, found.capacity_bytes)
        yield Text(f"{speed}, at most {memory}")
    yield heading("Written")
    table = Table.grid(padding=(0, 2))
    for name, path in (("model", found.exported), ("checkpoint", found.checkpoint), ("metrics", found.metrics)):
        table.add_row(name, path)
    yield table
