"""The share of the dense peak that an attention kernel reaches, forward and backward apart. Rows: data/attention.toml."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ullage.calibration.interpolate import interpolated
from ullage.calibration.store import Provenance, Value, efficiency, speaker, table
from ullage.frozen import frozen, replace
from ullage.hardware.catalogue import device as catalogued
from ullage.hardware.cluster import Device

_MEASURED_DTYPES = ("bf16", "fp16")
_TERA = 1e12

BUILT_IN = "flash-built-in"
"""FlashAttention-2 as torch had it built in until 2025-03."""


@frozen
class _Row:
    """One published series: the share of the peak by sequence length."""

    head_dim: int
    seq: tuple[float, ...]
    shares: tuple[float, ...]
    source: str


@functools.lru_cache(maxsize=1 << 14)
def attention_efficiency(
    device: Device,
    impl: str,
    dtype: str,
    head_dim: int,
    seq: int,
    causal: bool,
    backward: bool,
    batch_heads: int | None = None,
    short: bool = False,
) -> Value:
    """Share of the dense peak of ``dtype`` that attention over ``seq`` keys reaches.

    FLOPs: 4 batch heads seq^2 head_dim forward, 2.5 times that backward, half of either under a causal mask.
    impl: flash (FlashAttention-2, as torch's own backend), BUILT_IN, flash-2, flash-3, flash-4, cudnn (and te, fused), mem-efficient, math
    (and eager). batch_heads: batch times query heads on this rank; None: as many as fill the device.
    short: for the moment of a boost clock, not for a run.
    An implementation or a head size that was not measured on the device takes the nearest that was, marked ``default``.
    """
    assert min(head_dim, seq) >= 1, (head_dim, seq)
    used, provenance = _kernel(device, impl, causal, backward, short)
    if dtype not in _MEASURED_DTYPES or not used.rows[0].head_dim <= head_dim <= used.rows[-1].head_dim:
        provenance = "default"
    share = _by_head_dim(used.rows, head_dim, seq) * _occupancy(used, seq, backward, batch_heads)
    source = used.rows[0].source
    built_in = table("attention")["built_in"]
    if impl == BUILT_IN and device.name in built_in["kept"]:
        share, source = share * built_in["kept"][device.name], f"{source}; {built_in['source']}"
        provenance = "default" if backward else provenance
    return efficiency(min(share, 1.0), provenance if used.exact else "default", source)


@frozen
class _Kernel:
    """The rows that answer for an implementation on a device. exact: that implementation itself."""

    impl: str
    rows: tuple[_Row, ...]
    exact: bool
    sms: int
    architecture: str


@functools.cache
def _kernel(device: Device, impl: str, causal: bool, backward: bool, short: bool) -> tuple[_Kernel, Provenance]:
    data = table("attention")
    wanted = data["alias"].get(impl, impl)
    assert wanted in data["instead"], impl
    name, provenance = speaker("attention", device)
    sms: Mapping[str, int] = table("matmul")["sms"]["devices"]
    for measured in dict.fromkeys((name, data["stands_for"]["any"])):
        for candidate in (wanted, *data["instead"][wanted]):
            if rows := _rows(measured, candidate, causal, backward):
                exact = candidate == wanted and measured == name
                count = sms.get(device.name, table("matmul")["sms"]["any"])
                architecture = catalogued(measured).architecture
                if not short and device.name in data["sustained"]["kept"] and candidate in data["sustained"]["impls"]:
                    rows = tuple(_as_kept(row, device) for row in rows)
                    provenance = provenance if (candidate, backward) == ("flash-4", False) else "default"
                return _Kernel(impl=candidate, rows=rows, exact=exact, sms=count, architecture=architecture), provenance
    raise AssertionError(f"no row stands for {impl}, causal={causal}, backward={backward}")


def _rows(name: str, impl: str, causal: bool, backward: bool) -> tuple[_Row, ...]:
    peak = dict(catalogued(name).flops_per_s)["bf16"]
    found = (
        _row(one, peak)
        for one in table("attention")["measured"]
        if (one["device"], one["impl"], one["causal"], one["backward"]) == (name, impl, causal, backward)
    )
    return tuple(sorted(found, key=lambda row: row.head_dim))


def _as_kept(row: _Row, device: Device) -> _Row:
    """What a busy chip keeps of rates that were measured one kernel at a time, at boost clock. Measured of FlashAttention-4's forward."""
    sustained = table("attention")["sustained"]
    kept = sustained["kept"][device.name]
    shares = tuple(
        share * (kept if seq <= sustained["until"] else 1.0) for seq, share in zip(row.seq, row.shares, strict=True)
    )
    return replace(row, shares=shares, source=f"{row.source}; sustained: {sustained['source']}")


def _row(one: Mapping[str, Any], peak: float) -> _Row:
    return _Row(
        head_dim=one["head_dim"],
        seq=tuple(float(length) for length in one["seq"]),
        shares=tuple(tflops * _TERA / peak for tflops in one["tflops"]),
        source=one["source"],
    )


def _by_head_dim(rows: Sequence[_Row], head_dim: int, seq: int) -> float:
    """Linear in the logarithm of the head size between the measured ones, the nearest beyond them."""
    return interpolated(
        [float(row.head_dim) for row in rows], [interpolated(row.seq, row.shares, seq) for row in rows], head_dim
    )


def _occupancy(kernel: _Kernel, seq: int, backward: bool, batch_heads: int | None) -> float:
    """How much of the published rate is left where few heads leave SMs without a block of query rows."""
    if batch_heads is None:
        return 1.0
    data = table("attention")["occupancy"]
    of_kernel = data.get(kernel.architecture, data).get(kernel.impl) or data.get(kernel.impl, data["any"])
    half = of_kernel["backward" if backward else "forward"]
    blocks = batch_heads * -(-seq // data["block_rows"]) / kernel.sms
    reference = data["reference"]
    return float(blocks / (blocks + half) * (reference + half) / reference)
