"""The catalogues as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ullage.report.words import in_gib, plural
from ullage.units import format_count, gb

if TYPE_CHECKING:
    from ullage.hardware.cluster import Device
    from ullage.model.facts import ModelFacts


def models_report(found: Sequence[ModelFacts]) -> Iterator[RenderableType]:
    table = _table(("name", "type", "parameters>", "layers>", "hidden>", "Hugging Face id"))
    for one in found:
        size = format_count(one.parameters)
        row = (one.name, one.model_type, size, f"{one.layers}", f"{one.hidden}", one.hugging_face_id)
        table.add_row(*map(Text, row))
    yield table
    yield Text(
        f" {plural(len(found), 'model')}. A model that is not here: give the path of its config.json.", style="dim"
    )


def devices_report(found: Sequence[tuple[Device, tuple[str, ...]]]) -> Iterator[RenderableType]:
    """Capacity in GiB as the driver reports it; bandwidth in 10^12 bytes a second; dense bf16 in 10^12 FLOPs a second."""
    table = _table(("name", "capacity>", "bandwidth>", "bf16>", "also called"))
    for device, aliases in found:
        bandwidth = device.memory_bytes_per_s
        bf16 = dict(device.flops_per_s).get("bf16")
        table.add_row(
            Text(device.name),
            Text(in_gib(device.capacity_bytes)),
            Text(f"{gb(bandwidth):,.0f} GB/s" if bandwidth else "-"),
            Text(f"{gb(bf16) / 1000:,.0f} TFLOP/s" if bf16 else "-"),
            Text(", ".join(aliases), style="dim"),
        )
    yield table
    yield Text(
        f" {plural(len(found), 'device')}. Capacity: what the driver reports. In a job file: 8xH100-SXM-80GB, or a mapping of your own.",
        style="dim",
    )


def _table(columns: Sequence[str]) -> Table:
    """A name that ends in > is a column of numbers."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        number = name.endswith(">")
        table.add_column(name.rstrip(">"), justify="right" if number else "left", no_wrap=name != columns[-1])
    return table
