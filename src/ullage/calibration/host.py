"""Bytes per second between a GPU and its host, of a node's memory and of its NVMe drives; seconds to issue an op. Rows: data/host.toml."""

from __future__ import annotations

import functools
from typing import Literal

from ullage.calibration.store import Provenance, Value, efficiency, table
from ullage.hardware.cluster import Device

Direction = Literal["h2d", "d2h"]
HostOptimizer = Literal["fused", "foreach"]


@functools.cache
def host_bytes_per_s(device: Device, direction: Direction, both: bool = False, pinned: bool = True) -> Value:
    """One direction of the host link, large copies. both: while the other direction is busy too. pinned: page-locked memory."""
    data = table("host")
    if device.measured is not None and device.measured.host_bytes_per_s is not None:
        rate = device.measured.host_bytes_per_s[0 if direction == "h2d" else 1]
        rate *= (data["any"]["both"] if both else 1.0) * (1.0 if pinned else data["pageable"]["share"])
        plain: Provenance = "default" if both or not pinned else "measured"
        return Value(value=rate, provenance=plain, source=device.measured.source)
    row, provenance = data["any"], "default"
    for link in data["links"]:
        if link["word"] in (device.host_link_name or "").casefold():
            row, provenance = link, "measured"
    nominal = device.host_link_bytes_per_s
    if nominal is None:
        nominal, provenance = data["unknown"]["bytes_per_s"], "default"
    share = row[direction] * (row["both"] if both else 1.0)
    known: Provenance = "measured" if provenance == "measured" else "default"
    if not pinned:
        share, known = share * data["pageable"]["share"], "default"
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


@functools.cache
def host_optimizer_bytes_per_s(device: Device, impl: HostOptimizer, gpus: int) -> Value:
    """What an optimizer on all cores moves through the memory of a node of ``gpus`` GPUs."""
    data = table("host")
    name = (device.host_link_name or "").casefold()
    optimizer = data["optimizers"][impl]
    row = next((one for one in data["memory"] if one["word"] in name), data["memory"][0])
    known: Provenance = "measured" if row["word"] == optimizer["measured_on"] and row["word"] in name else "default"
    share = efficiency(optimizer["share"], known, f"{optimizer['source']}; {row['source']}")
    peak = row["bytes_per_s"] * (gpus if row.get("per_gpu") else 1)
    return Value(value=peak * share.value, provenance=known, source=share.source)


@functools.cache
def thread_elements_per_s(impl: HostOptimizer) -> Value:
    """Elements that an optimizer on one thread steps, however few threads use the memory."""
    row = table("host")["optimizers"][impl]
    return Value(value=row["elements_per_s"], provenance="default", source=row["thread_source"])


@functools.cache
def issue_s(device: Device, kind: Literal["module", "torch"]) -> Value:
    """Seconds of the host for one op of eager PyTorch. module: forward or backward, of one whose function is Python's. torch: forward, of
    an op of torch's own among others."""
    row = table("host")["issue"]
    known: Provenance = "measured" if device.name == row["measured_on"] else "default"
    source = row["torch_source" if kind == "torch" else "source"]
    return Value(value=_issued_s(device, row[f"{kind}_us"]), provenance=known, source=source)


@functools.cache
def linear_s(device: Device) -> tuple[float, float]:
    """Seconds of the host for a matmul of Transformer Engine's modules: of a forward's one, and of each of a backward's two."""
    row = table("host")["issue"]
    forward, backward = row["linear_us"], (row["linear_both_us"] - row["linear_us"]) / 2
    return _issued_s(device, forward), _issued_s(device, backward)


def _issued_s(device: Device, micros: float) -> float:
    share: float = table("host")["issue"]["hosts"].get(device.name, 1.0)
    return micros * share / 1e6
