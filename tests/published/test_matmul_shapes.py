"""Matmuls against published timings of single shapes; bounds are on |log(model / measured)|.

The shapes of ``devices``, short collections, were among those that the six terms of a device were fitted to (60 of more than
13,000). Those of ``linear_layers`` and ``experts`` are another laboratory's: only the plateau of the A100 PCIe was taken from the
former, nothing from the latter.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median, quantiles

import pytest

from ullage.calibration.matmul import grouped_matmul_efficiency, matmul_efficiency
from ullage.hardware.catalogue import device

PUBLISHED = json.loads((Path(__file__).parent / "data" / "matmul_shapes.json").read_text(encoding="utf-8"))

# (median, 90th percentile) that each device's residuals stay within: consumer boards under a power limit are noisier.
BOUNDS = {"L40S-48GB": (0.11, 0.25)}
BOUND = (0.06, 0.16)


def errors(name: str) -> list[float]:
    gpu = device(name)
    peak = dict(gpu.flops_per_s)["bf16"]
    return [
        math.log(2 * m * n * k / peak / matmul_efficiency(gpu, "bf16", m, n, k, short=True).value / (us * 1e-6))
        for m, n, k, us in PUBLISHED["devices"][name]
    ]


@pytest.mark.parametrize("name", PUBLISHED["devices"])
def test_single_shapes(name: str) -> None:
    found = errors(name)
    middle, nine_in_ten = BOUNDS.get(name, BOUND)
    sizes = [abs(error) for error in found]
    assert median(sizes) < middle, sizes
    assert quantiles(sizes, n=10)[-1] < nine_in_ten, sizes
    assert abs(median(found)) < 0.05


def test_what_a_power_limit_leaves() -> None:
    """One factor was taken from all 252 of them; that it is one for most shapes is what this holds."""
    gpu = device(PUBLISHED["sustained"]["device"])
    found = [
        math.log(matmul_efficiency(gpu, "bf16", m, n, k).value / share)
        for m, n, k, share in PUBLISHED["sustained"]["rows"]
    ]
    assert len(found) == 51
    assert median(abs(error) for error in found) < 0.06
    assert abs(median(found)) < 0.03


@pytest.mark.parametrize("name", PUBLISHED["warm"]["devices"])
def test_what_a_warm_chip_keeps(name: str) -> None:
    """Random data after ten thousand rounds. One factor of each device was taken from these; fp8's plateau is bf16's, scaled."""
    gpu = device(name)
    found = [
        math.log(matmul_efficiency(gpu, dtype, m, n, k).value * dict(gpu.flops_per_s)[dtype] / (tflops * 1e12))
        for dtype, m, n, k, tflops in PUBLISHED["warm"]["devices"][name]
    ]
    assert abs(median(found)) < 0.01
    assert max(abs(error) for error in found) < 0.05


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_the_linear_layers_of_real_models(layout: str) -> None:
    """Forward (TN), the gradient of the input (NN), and that of the weights into an fp32 buffer (NT)."""
    gpu = device(PUBLISHED["linear_layers"]["device"])
    found = [
        math.log(matmul_efficiency(gpu, "bf16", m, n, k, adds).value / share)
        for m, n, k, kind, adds, share in PUBLISHED["linear_layers"]["rows"]
        if kind == layout
    ]
    assert len(found) == 61
    assert median(abs(error) for error in found) < 0.04
    assert abs(median(found)) < 0.03
    assert max(abs(error) for error in found) < 0.45


def test_the_experts_of_a_mixture() -> None:
    gpu = device(PUBLISHED["experts"]["device"])
    for groups, m, n, k, adds, share in PUBLISHED["experts"]["rows"]:
        assert grouped_matmul_efficiency(gpu, "bf16", groups, m, n, k, adds).value == pytest.approx(share, rel=0.12)
