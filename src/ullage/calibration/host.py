"""Bytes per second between a GPU and its host, and of a node's NVMe drives. Rows: data/host.toml."""

from __future__ import annotations

import functools
from typing import Literal

from ullage.calibration.store import Provenance, Value, efficiency, table
from ullage.hardware.cluster import Device

Direction = Literal["h2d", "d2h"]


@functools.cache
def host_bytes_per_s(device: Device, direction: Direction, both: bool = False) -> Value:
    """One direction of the host link, pinned memory, large copies. both: while the other direction is busy too."""
    data = table("host")
    row, provenance = data["any"], "default"
    for link in data["links"]:
        if link["word"] in (device.host_link_name or "").casefold():
            row, provenance = link, "measured"
    nominal = device.host_link_bytes_per_s
    if nominal is None:
        nominal, provenance = data["unknown"]["bytes_per_s"], "default"
    share = row[direction] * (row["both"] if both else 1.0)
    known: Provenance = "measured" if provenance == "measured" else "default"
    rate = nominal * efficiency(share, known, row["source"]).value
    return Value(value=rate, provenance=known, source=row["source"])


@functools.cache
def nvme_bytes_per_s(drives: int, write: bool = False) -> Value:
    """All of a node's drives together, in RAID-0: the nearest measured array, scaled to ``drives``; ``default`` where scaled."""
    assert drives >= 1, drives
    rows = table("host")["nvme"]
    row = min(rows, key=lambda one: (abs(one["drives"] - drives), one["drives"]))
    rate = row["write_bytes_per_s" if write else "read_bytes_per_s"] * drives / row["drives"]
    return Value(value=rate, provenance="measured" if row["drives"] == drives else "default", source=row["source"])
