"""The share of the dense peak that one matrix multiplication reaches, from its shape.

A kernel cuts the output into tiles and works them off in waves over the SMs; a last wave that is not full, a tile that sticks out
of the matrix, the start of each tile's pipeline over k and small tiles' poor reuse cost time, and so does memory where the shape
has little arithmetic per byte. The library's choice is modelled as the fastest of its usual tiles. Terms: data/matmul.toml.
"""

from __future__ import annotations

import functools
from typing import Literal

from ullage.calibration.interpolate import interpolated
from ullage.calibration.store import Provenance, Value, efficiency, speaker, table, weaker
from ullage.dtypes import bits
from ullage.frozen import frozen, replace
from ullage.hardware.cluster import Device

# Output tiles (rows, columns) of cuBLAS and CUTLASS kernels; on Blackwell two SMs share the largest.
_TILES = ((256, 256), (256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4)  # of k
_REUSE = 256 * 256 / (256 + 256)  # FLOPs per operand element of the largest tile, up to a factor
# How sharply a kernel turns from bound by compute to bound by memory: the fourth power lets the larger of the two decide.
_KNEE = 4.0
_LOW_PRECISION = ("fp8", "int8", "fp4", "nf4")
_FOUR_BITS = 4
_ALL = efficiency(1.0, "measured", "by definition")
_STORED_AS = {"tf32": "fp32"}  # a way to multiply, not to store


@frozen
class _Terms:
    """One device's and element type's row of the table, with what the device itself says."""

    flops_per_s: float
    memory_bytes_per_s: float
    sms: int
    tiles: tuple[tuple[int, int, float], ...]  # rows, columns, seconds per element of k on one SM
    k_prologue: float
    start_s: float
    split_s: float
    element_bytes: float
    accumulate_bytes: float  # of an output element
    accumulate_exposed: float  # the share of them that tiles bound by compute do not hide
    provenance: Provenance
    source: str


@functools.lru_cache(maxsize=1 << 16)
def matmul_efficiency(
    device: Device, dtype: str, m: int, n: int, k: int, accumulate: bool = False, short: bool = False
) -> Value:
    """Share of the dense peak of ``dtype`` that (m, k) x (k, n) -> (m, n) reaches in sustained work.

    Seconds are 2 m n k / (peak x efficiency); they hold the kernel's start and its memory traffic, so add no roofline of your own.
    accumulate: the result is added to an fp32 buffer (a fused gradient of the weights). short: for the moment of a boost clock, not for a
    long run. Source and residuals: data/matmul.toml.
    """
    return _efficiency(_terms(device, dtype, short), 1, m, n, k, accumulate)


@functools.lru_cache(maxsize=1 << 16)
def grouped_matmul_efficiency(
    device: Device, dtype: str, groups: int, m: int, n: int, k: int, accumulate: bool = False, streams: int = 0
) -> Value:
    """The same of ``groups`` equal matmuls in one grouped kernel: m rows per expert, or per expert's gradient.

    Tiles do not span groups, so few rows per expert waste them; waves do span groups. Equal groups: an imbalance is the caller's.
    streams: kernels of one group each, as many at a time (Transformer Engine's multi-stream cuBLAS), which start one after another;
    0: one kernel for all.
    """
    terms = _terms(device, dtype)
    together = min(streams, groups)
    if not together:
        return _efficiency(terms, groups, m, n, k, accumulate)
    starts_s = together * table("matmul")["streams"]["start_us"] * 1e-6
    return _efficiency(replace(terms, start_s=starts_s), together, m, n, k, accumulate)


@functools.cache
def misaligned(dtype: str, cuda: str = "") -> Value:
    """What a batched matmul keeps of its rate where rows do not start at multiples of 16 bytes. cuda: whose cuBLAS; "" a recent one."""
    rows = table("matmul")["misaligned"]
    row = rows.get(cuda, rows)
    return efficiency(row.get(dtype, row["any"]), "default", row["source"])


Scales = Literal["tensor", "row", "block"]
"""What has a scale of its own in an 8-bit operand."""


@functools.cache
def scaled(scales: Scales, m: int, n: int, k: int) -> Value:
    """What an 8-bit matmul keeps of the rate of one with a scale for each tensor."""
    if scales == "tensor":
        return _ALL
    row = table("matmul")["scales"][scales]
    share = interpolated(row["size"], row["share"], (m * n * k) ** (1 / 3))
    return efficiency(share, "default", row["source"])


@functools.cache
def early_library(device: Device, dtype: str, cuda: str) -> Value:
    """What a large matmul by cuBLAS of an early ``cuda`` keeps of the rate that a later one reaches."""
    row = table("matmul")["early"].get(device.architecture, {"cuda": [], "source": "not measured"})
    kept = row.get(dtype, 1.0) if cuda in row["cuda"] else 1.0
    return efficiency(kept, "default", row["source"])


def _efficiency(terms: _Terms, groups: int, m: int, n: int, k: int, accumulate: bool) -> Value:
    assert min(groups, m, n, k) >= 1, (groups, m, n, k)
    outputs = groups * m * n
    compute_s = _tiled_s(terms, groups, m, n, k)
    written = 0.0 if accumulate else outputs * max(terms.element_bytes, 2.0)
    moved = groups * (m * k + k * n) * terms.element_bytes + written
    memory_s = moved / terms.memory_bytes_per_s
    kernel_s: float = (compute_s**_KNEE + memory_s**_KNEE) ** (1 / _KNEE)
    if accumulate:
        added_s = outputs * terms.accumulate_bytes / terms.memory_bytes_per_s
        kernel_s = max(kernel_s + added_s * terms.accumulate_exposed, memory_s + added_s)
    total_s = terms.start_s + kernel_s
    return efficiency(2.0 * outputs * k / terms.flops_per_s / total_s, terms.provenance, terms.source)


def _tiled_s(terms: _Terms, groups: int, m: int, n: int, k: int) -> float:
    """Seconds of the waves of tiles, with the best tile and split of k."""
    sms, k_prologue = terms.sms, terms.k_prologue
    best = float("inf")
    for rows, columns, seconds in terms.tiles:
        tiles = groups * -(-m // rows) * -(-n // columns)
        for split in _SPLITS:
            took = -(-tiles * split // sms) * (k / split + k_prologue) * seconds
            if split > 1:
                took += terms.split_s
            if took < best:
                best = took
            if tiles * split >= 4 * sms:
                break  # the waves are full: splitting further only costs
    return best


@functools.cache
def _terms(device: Device, dtype: str, short: bool = False) -> _Terms:
    data = table("matmul")
    name, provenance = speaker("matmul", device)
    row = data["devices"][name]["bf16"]
    plateau, source = row["plateau"], row["source"]
    if "sustained" in row and not short:
        plateau, source = plateau * row["sustained"], f"{source}; sustained: {row['sustained_source']}"
    if provenance == "default" and device.name in data["best"]["bf16"]:
        plateau *= data["best"]["bf16"][device.name] / data["best"]["bf16"][name]
        source = f"{source}, scaled to this device's best shape: {data['best']['source']}"
    k_prologue = row["k_prologue"]
    if dtype in _LOW_PRECISION:
        best, like = data["best"]["fp8" if bits(dtype) > _FOUR_BITS else "fp4"], data["best"]["bf16"]
        plateau *= best.get(device.name, 1.0) / like.get(device.name, 1.0) if device.name in best else 1.0
        k_prologue *= 16 // bits(dtype)  # the same time, in which more elements of k pass
        provenance = "default"
    elif dtype not in ("bf16", "fp16"):
        provenance = "default"
    plateau = min(plateau, 1.0)
    peak = dict(device.flops_per_s).get(dtype)
    if peak is None:
        peak, provenance = _some_peak(device), "default"
    bandwidth = device.memory_bytes_per_s
    if bandwidth is None:
        bandwidth, provenance = peak / _FLOPS_PER_BYTE, "default"
    exposed = data["accumulate"]["exposed"]
    sms_of, any_sms = data["sms"]["devices"], data["sms"]["any"]
    sms = sms_of.get(device.name, any_sms)
    return _Terms(
        flops_per_s=peak,
        memory_bytes_per_s=bandwidth * row["memory"],
        sms=sms,
        tiles=tuple(_tile(rows, columns, peak * plateau / sms, row["small_tile"]) for rows, columns in _TILES),
        k_prologue=k_prologue,
        start_s=row["start_s"],
        split_s=row["split_s"],
        element_bytes=bits(_STORED_AS.get(dtype, dtype)) / 8,
        accumulate_bytes=data["accumulate"]["bytes_per_element"],
        accumulate_exposed=exposed.get(device.architecture, exposed["any"]),
        provenance=weaker(provenance, "measured"),
        source=source,
    )


# What a device without a stated bandwidth is taken to have: the ratio of an A100 (312 TFLOP/s over 2.04 TB/s).
_FLOPS_PER_BYTE = 150.0


def _some_peak(device: Device) -> float:
    """Any peak of the device; its efficiency is a share, so only the balance against memory depends on it."""
    return max((peak for _, peak in device.flops_per_s), default=1e14)


def _tile(rows: int, columns: int, sm_flops_per_s: float, small_tile: float) -> tuple[int, int, float]:
    reuse = rows * columns / (rows + columns) / _REUSE
    speed = reuse / (reuse + small_tile) * (1 + small_tile)
    return rows, columns, 2 * rows * columns / (sm_flops_per_s * speed)
