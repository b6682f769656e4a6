"""Kernels that memory bounds: their share of HBM bandwidth, and what a kernel costs beside its bytes. Rows: data/memory.toml."""

from __future__ import annotations

import functools
from typing import Literal

from ullage.calibration.store import Value, efficiency, speaker, table
from ullage.hardware.catalogue import device as catalogued
from ullage.hardware.cluster import Device

MemoryKind = Literal[
    "pointwise",
    "tanh",
    "norm",
    "early_norm",
    "early_norm_backward",
    "softmax",
    "cross_entropy",
    "optimizer",
    "permute",
    "copy",
    "quantize",
    "quantize_triton",
    "scan",
]
"""early_norm: of apex and Megatron until 2021-10."""
MEASURED_AS: dict[MemoryKind, MemoryKind] = {"quantize": "copy", "quantize_triton": "copy", "scan": "pointwise"}
"""Kinds that no benchmark of ours runs, by the one that stands for them."""
_ON_A_GPU: dict[str, MemoryKind] = {"tanh": "pointwise"}
"""Kinds that are told apart where they are measured: a CPU computes a tanh for ten times as long as it moves it."""


@functools.cache
def memory_efficiency(device: Device, kind: MemoryKind) -> Value:
    """Share of the device's HBM bandwidth that a kernel of ``kind`` reaches; its bytes are each read and each write once."""
    kind = _ON_A_GPU.get(kind, kind)
    data = table("memory")
    name, provenance = speaker("memory", device)
    row = data["devices"][name].get(kind)
    if row is None:
        akin = (rows[kind] for one, rows in data["devices"].items() if kind in rows and _akin(one, device))
        row, provenance = next(akin, data["any"][kind]), "default"
    return efficiency(row["share"], provenance, row["source"])


def _akin(name: str, device: Device) -> bool:
    """Whether two devices are of one architecture."""
    return bool(device.architecture) and catalogued(name).architecture == device.architecture


@functools.cache
def kernel_start_s() -> Value:
    """Seconds on the GPU that a kernel takes beside its bytes or FLOPs."""
    kernel = table("memory")["kernel"]
    return Value(value=kernel["start_us"] / 1e6, provenance="measured", source=kernel["start_source"])
