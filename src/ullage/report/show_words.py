"""A value of a technique's table in words, by its unit."""

from __future__ import annotations

from ullage.report.words import share
from ullage.techniques.told import Part, Unit, Value
from ullage.units import format_bytes, format_count, format_seconds

COUNTED_OUT = 10**6
"""From here on a count is told in millions and billions."""


def cell(value: Value, unit: Unit) -> str:
    """``140.00 GiB``, ``389.44 µs``, ``1,280``, ``8,192 x 1,024``; nothing where there is no value."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, tuple):
        return " x ".join(f"{size:,}" for size in value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    if unit == "flops":
        return format_count(value)
    if unit == "count":
        return f"{value:,.0f}" if value < COUNTED_OUT else format_count(value)
    if unit == "share":
        return share(value, 1.0)
    if unit == "ratio":
        return f"{value:.2f} x"
    return f"{value:.4g}"


def total(part: Part) -> list[str]:
    """The last line of a table: the sums of the columns that add up."""
    first = next(column.name for column in part.columns)
    return [
        cell(part.total(column.name), column.unit) if column.summed else "together" if column.name == first else ""
        for column in part.columns
    ]
