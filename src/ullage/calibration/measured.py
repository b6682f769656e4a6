"""Look-ups in what `ullage bench` measured of a machine: between its sizes in their logarithms, beyond them at the rate of the last."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence

from ullage.errors import Unsupported
from ullage.hardware.measured import Attended, Direction, Measured, Moved, Multiplied


@functools.lru_cache(maxsize=1 << 14)
def matmul_flops_per_s(
    measured: Measured, dtype: str, direction: Direction, m: int, n: int, k: int, groups: int = 1
) -> float:
    """Of [m, k] x [k, n], ``groups`` of them at once."""
    wanted: Direction = "batched" if groups > 1 else direction
    grid = next((one for one in measured.matmuls if (one.dtype, one.direction) == (dtype, wanted)), None)
    if grid is None:
        raise _unmeasured(measured, f"a matrix product in {dtype}", [one.dtype for one in measured.matmuls])
    return _on_grid(grid, m, n, k)


def _on_grid(grid: Multiplied, m: int, n: int, k: int) -> float:
    """Linear in the logarithms of the three sizes between the eight corners around them: seconds of a FLOP, which add up where a rate
    does not."""
    sides = [_between(axis, size) for axis, size in ((grid.m, m), (grid.n, n), (grid.k, k))]
    found = 0.0
    for at_m, share_m in sides[0]:
        for at_n, share_n in sides[1]:
            for at_k, share_k in sides[2]:
                rate = grid.flops_per_s[(at_m * len(grid.n) + at_n) * len(grid.k) + at_k]
                found += share_m * share_n * share_k / rate
    return 1.0 / found


@functools.lru_cache(maxsize=1 << 12)
def attention_flops_per_s(
    measured: Measured, dtype: str, head_dim: int, seq: int, causal: bool, backward: bool
) -> float:
    """Of fused attention. A head size that was not measured takes the nearest."""
    series = [one for one in measured.attention if (one.dtype, one.causal, one.backward) == (dtype, causal, backward)]
    if not series:
        raise _unmeasured(measured, f"attention in {dtype}", [one.dtype for one in measured.attention])
    nearest: Attended = min(series, key=lambda one: abs(math.log(one.head_dim / head_dim)))
    return 1.0 / sum(share / nearest.flops_per_s[at] for at, share in _between(nearest.seq, seq))


@functools.lru_cache(maxsize=1 << 14)
def traffic_s(measured: Measured, kind: str, dtype: str, moved_bytes: float, *, backward: bool) -> float:
    """Of one op that reads and writes ``moved_bytes``; of none, nothing. A kind that was measured forward alone is as fast backward."""
    if moved_bytes <= 0:
        return 0.0
    series = {one.backward: one for one in measured.traffic if (one.kind, one.dtype) == (kind, dtype)}
    found: Moved | None = series.get(backward) or series.get(not backward)
    if found is None:
        known = [f"{one.kind} in {one.dtype}" for one in measured.traffic]
        raise _unmeasured(measured, f"an op of kind {kind} in {dtype}", known)
    sizes, seconds = found.bytes, found.seconds
    if moved_bytes <= sizes[0]:
        return seconds[0]
    if moved_bytes >= sizes[-1]:
        return seconds[-1] * moved_bytes / sizes[-1]
    above = bisect_left(sizes, moved_bytes)
    part = math.log(moved_bytes / sizes[above - 1]) / math.log(sizes[above] / sizes[above - 1])
    return seconds[above - 1] * math.pow(seconds[above] / seconds[above - 1], part)


def _between(axis: Sequence[float], size: float) -> tuple[tuple[int, float], ...]:
    """(index, share) of the neighbours on an axis; the nearest alone beyond its ends."""
    if size <= axis[0]:
        return ((0, 1.0),)
    if size >= axis[-1]:
        return ((len(axis) - 1, 1.0),)
    above = bisect_left(axis, size)
    part = math.log(size / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
    return ((above - 1, 1.0 - part), (above, part))


def _unmeasured(measured: Measured, what: str, known: Sequence[str]) -> Unsupported:
    return Unsupported(
        f"{what} was not measured on this machine",
        key="the time of a step",
        allowed=", ".join(dict.fromkeys(known)),
        remedy=f"measure it without --quick: ullage bench ({measured.file})" if measured.file else "ullage bench",
    )
