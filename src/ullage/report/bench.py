"""What a calibration file says, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ullage.hardware.machine import read
from ullage.report.words import in_gib
from ullage.units import gb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ullage.hardware.measured import Measured


def bench_report(path: Path) -> Iterator[RenderableType]:
    """Best rates by number of processes, and how much repeats differ."""
    machine = read(path)
    device = machine.device
    yield Text(f"{device.name}, {in_gib(device.capacity_bytes)}: {device.source}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    types = list(dict(device.flops_per_s))
    for name in (
        "processes",
        "threads",
        *(f"{dtype} GFLOP/s" for dtype in types),
        "memory GB/s",
        "all-reduce GB/s",
        "hidden",
        "spread",
    ):
        table.add_column(name, justify="right")
    for run in machine.runs:
        table.add_row(*_row(run, types))
    yield table
    yield Text(f"of one process; written to {path}", style="dim")
    yield Text(f"in a job: cluster: 2x{device.name}, or --calibration {path}", style="dim")
    if any(run.spread > _NOISY for run in machine.runs):
        yield Text(
            f"repeats differ by more than {100 * _NOISY:.0f} %: measure again when the machine does nothing else",
            style="yellow",
        )


_NOISY = 0.15


def _row(run: Measured, types: list[str]) -> list[str]:
    rates = {
        dtype: max((max(one.flops_per_s) for one in run.matmuls if one.dtype == dtype), default=0.0) for dtype in types
    }
    moved = max(one.bytes[-1] / one.seconds[-1] for one in run.traffic if one.kind == "copy")
    sent = [one.payload_bytes[-1] / one.seconds[-1] for one in run.collectives if one.kind == "all_reduce"]
    return [
        str(run.processes),
        str(run.threads),
        *(f"{gb(rate):,.1f}" for rate in rates.values()),
        f"{gb(moved):,.1f}",
        f"{gb(sent[0]):,.2f}" if sent else "-",
        f"{100 * run.overlap:.0f} %" if sent else "-",
        f"{100 * run.spread:.0f} %",
    ]
