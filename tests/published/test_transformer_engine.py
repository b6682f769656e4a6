"""Transformer Engine's own timing of a layer's twelve matmuls on a B300: NVIDIA/TransformerEngine@d0067d0
docs/examples/gemm_profiling/gemm_profiling.rst."""

from __future__ import annotations

import pytest

from ullage.calibration.matmul import Scales
from ullage.hardware.catalogue import device
from ullage.timing.machine import matmul_s, traffic_s
from ullage.timing.work import Matmul, Traffic

ROWS, HIDDEN, FFN = 15_872, 4096, 16_384
LINEARS = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN))  # k, n
B300 = device("B300-SXM-288GB")


def _matmuls(dtype: str, scales: Scales = "tensor") -> list[Matmul]:
    forward = [Matmul(m=ROWS, n=n, k=k, dtype=dtype, scales=scales) for k, n in LINEARS]
    return [one for first in forward for one in (first, *first.transposes(accumulate=False))]


@pytest.mark.parametrize(
    ("dtype", "scales", "ms"),
    [
        ("bf16", "tensor", 12.758),
        ("fp8", "tensor", 6.812),  # current scaling
        ("fp8", "block", 7.161),  # MXFP8
        ("fp4", "tensor", 3.764),
    ],
)
def test_on_operands_that_are_cast_already(dtype: str, scales: Scales, ms: float) -> None:
    assert 1e3 * sum(matmul_s(B300, one) for one in _matmuls(dtype, scales)) == pytest.approx(ms, rel=0.06)


@pytest.mark.parametrize(
    ("first", "second", "ms"),
    [
        # Bytes of an element of the first operand, of which its gradient's column order is made too, and of the second, of which it is not.
        (2 + 2, 2 + 1, 8.984 - 7.161),  # MXFP8
        (2 + 2 + 1, 2 + 2 + 1, 9.147 - 6.812),  # current scaling, one order on Blackwell
        (2 + 2 + 2 * 9 / 16, 2 + 2 + 9 / 16, 6.453 - 3.764),  # NVFP4
    ],
)
def test_casts(first: float, second: float, ms: float) -> None:
    """The benchmark runs forwards of Linear(k, n) on [m, k] for each of the three, so that both operands are cast."""
    moved = (
        Traffic(bytes=round(first * one.m * one.k + second * one.k * one.n), kind="quantize") for one in _matmuls("fp8")
    )
    assert 1e3 * sum(traffic_s(B300, one, backward=False) for one in moved) == pytest.approx(ms, rel=0.12)
