"""What must be true of a matmul's efficiency whatever was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.calibration.matmul import grouped_matmul_efficiency, matmul_efficiency, scaled
from ullage.hardware.catalogue import device, devices
from ullage.hardware.cluster import Device

sides = st.integers(1, 1 << 18)
names = st.sampled_from(devices())


def seconds(gpu: Device, m: int, n: int, k: int, dtype: str = "bf16", accumulate: bool = False) -> float:
    peak = dict(gpu.flops_per_s)[dtype]
    return 2 * m * n * k / peak / matmul_efficiency(gpu, dtype, m, n, k, accumulate).value


@settings(max_examples=300, deadline=None)
@given(name=names, dtype=st.sampled_from(("bf16", "fp16", "fp8", "fp32", "tf32")), m=sides, n=sides, k=sides)
def test_an_efficiency_is_a_share(name: str, dtype: str, m: int, n: int, k: int) -> None:
    value = matmul_efficiency(device(name), dtype, m, n, k)
    assert 0 < value.value <= 1
    assert value.source


@settings(max_examples=200, deadline=None)
@given(m=sides, n=sides, k=sides, more=st.integers(1, 4096), side=st.integers(0, 2))
def test_a_larger_matmul_never_takes_less_time(m: int, n: int, k: int, more: int, side: int) -> None:
    gpu = device("H100-SXM-80GB")
    larger = [m, n, k]
    larger[side] += more
    assert seconds(gpu, m, n, k) <= seconds(gpu, *larger) * (1 + 1e-9)


@settings(deadline=None)
@given(m=sides, n=sides, k=sides)
def test_turning_a_matmul_changes_nothing(m: int, n: int, k: int) -> None:
    gpu = device("A100-SXM-80GB")
    assert matmul_efficiency(gpu, "bf16", m, n, k).value == pytest.approx(matmul_efficiency(gpu, "bf16", n, m, k).value)


@settings(deadline=None)
@given(m=sides, n=sides, k=sides)
def test_adding_to_a_buffer_costs_time(m: int, n: int, k: int) -> None:
    gpu = device("B200-SXM-180GB")
    assert seconds(gpu, m, n, k) < seconds(gpu, m, n, k, accumulate=True)


@settings(deadline=None)
@given(groups=st.integers(1, 256), m=st.integers(1, 8192), n=st.integers(1, 8192), k=st.integers(1, 8192))
def test_groups_are_no_faster_than_one_matmul_of_all_their_rows(groups: int, m: int, n: int, k: int) -> None:
    gpu = device("H100-SXM-80GB")
    grouped = grouped_matmul_efficiency(gpu, "bf16", groups, m, n, k).value
    assert grouped <= matmul_efficiency(gpu, "bf16", groups * m, n, k).value * (1 + 1e-9)
    assert grouped_matmul_efficiency(gpu, "bf16", 1, m, n, k) == matmul_efficiency(gpu, "bf16", m, n, k)


def test_a_last_wave_that_is_nearly_empty_costs() -> None:
    """132 tiles of 256 x 256 fill 132 SMs once; a few rows more need a second wave or smaller tiles."""
    gpu = device("H100-SXM-80GB")
    full = matmul_efficiency(gpu, "bf16", 12 * 256, 11 * 256, 4096).value
    over = matmul_efficiency(gpu, "bf16", 12 * 256 + 8, 11 * 256 + 8, 4096).value
    assert over < 0.95 * full


def test_where_the_numbers_come_from() -> None:
    def provenance(name: str, dtype: str = "bf16") -> str:
        return matmul_efficiency(device(name), dtype, 4096, 4096, 4096).provenance

    assert (
        provenance("A100-SXM-80GB") == provenance("A100-SXM-40GB") == provenance("H100-SXM-80GB", "fp16") == "measured"
    )
    assert provenance("RTX-3090-24GB") == provenance("MI300X-192GB") == provenance("H100-SXM-80GB", "fp8") == "default"


def test_a_device_without_terms_keeps_its_distance_from_the_best_shape() -> None:
    h100, gh200 = device("H100-SXM-80GB"), device("GH200-96GB")
    ratio = matmul_efficiency(gh200, "bf16", 1 << 14, 1 << 14, 1 << 14).value
    ratio /= matmul_efficiency(h100, "bf16", 1 << 14, 1 << 14, 1 << 14).value
    assert ratio == pytest.approx(0.838 / 0.803, rel=0.01)


def test_a_device_of_nobody_answers() -> None:
    value = matmul_efficiency(Device(name="box", capacity_bytes=1 << 34), "bf16", 4096, 4096, 4096)
    assert 0 < value.value <= 1
    assert value.provenance == "default"


@pytest.mark.parametrize(
    ("groups", "m", "n", "k", "share"),
    [(32, 1024, 4096, 7168, 0.457), (64, 512, 4096, 7168, 0.367), (64, 512, 7168, 2048, 0.427), (32, 1024, 7168, 2048, 0.384),
     (128, 256, 4096, 7168, 0.271), (128, 256, 7168, 2048, 0.303), (256, 128, 4096, 7168, 0.204), (256, 128, 7168, 2048, 0.178)],
)  # fmt: skip
def test_experts_on_streams(groups: int, m: int, n: int, k: int, share: float) -> None:
    """SimuMax's B200, Transformer Engine's grouped linear forward (MooreThreads/SimuMax@4dcaae5, group_matmul)."""
    gpu = device("B200-SXM-180GB")
    on_streams = grouped_matmul_efficiency(gpu, "bf16", groups, m, n, k, streams=4).value
    assert on_streams == pytest.approx(share, rel=0.25)
    assert on_streams < grouped_matmul_efficiency(gpu, "bf16", groups, m, n, k).value


def test_an_accumulating_matmul_of_few_rows_is_bound_by_memory() -> None:
    """The gradient of an expert that saw 128 rows: nothing but its fp32 buffer, read and written, takes time."""
    gpu = device("B200-SXM-180GB")
    share = grouped_matmul_efficiency(gpu, "bf16", 256, 4096, 7168, 128, accumulate=True).value
    seconds = 2 * 4096 * 7168 * 128 / (dict(gpu.flops_per_s)["bf16"] * share)
    assert seconds >= 4096 * 7168 * 8 / gpu.memory_bytes_per_s


@pytest.mark.parametrize(
    ("m", "n", "k", "tflops"),
    [
        (57344, 8192, 4096, 1020.6),
        (28672, 8192, 4096, 1020.4),
        (8192, 28672, 4096, 1033.7),
        (128256, 8192, 4096, 1023.2),
    ],
)
def test_gradients_of_large_weights_on_blackwell(m: int, n: int, k: int, tflops: float) -> None:
    """Added into fp32 (MooreThreads/SimuMax@4dcaae5 configs/system/b200_bf16_ceperm.json, layout NT, out_dtype fp32)."""
    gpu = device("B200-SXM-180GB")
    assert 2 * m * n * k / seconds(gpu, m, n, k, accumulate=True) == pytest.approx(tflops * 1e12, rel=0.02)


@pytest.mark.parametrize(("dtype", "milliseconds"), [("bf16", 14.426), ("fp8", 7.993)])
def test_a_feed_forward_of_metas_h100(dtype: str, milliseconds: float) -> None:
    """Forward and backward matmuls of a Llama 8B's MLP, 8,192 rows (meta-pytorch/float8_experimental#298, profile_linear_float8.py)."""
    gpu = device("H100-SXM-96GB")
    rows, hidden, ffn = 8192, 4096, 14336
    shapes = [(rows, ffn, hidden), (rows, hidden, ffn), (ffn, hidden, rows)]
    assert 3e3 * sum(seconds(gpu, *shape, dtype) for shape in shapes) == pytest.approx(milliseconds, rel=0.06)


def test_a_scale_for_each_row() -> None:
    assert scaled("row", 8192, 8192, 8192).value == pytest.approx(2.216 / 3.292, rel=1e-3)
    assert scaled("row", 4096, 4096, 4096).value == 1.0
    assert scaled("row", 1024, 16384, 8192).value == pytest.approx(scaled("row", 16384, 1024, 8192).value)


@pytest.mark.parametrize(
    ("name", "size", "tflops"),
    [
        # zzc0721/torch-performance-test-data@0785868 database.md and issues #71, #124, #114: other cards than those that the terms are of
        ("RTX-4090-24GB", 8192, 163.1),
        ("RTX-4070-Ti-SUPER-16GB", 4096, 98.5),
        ("RTX-5090-32GB", 8192, 234.7),
        ("RTX-3080-10GB", 4096, 61.5),
    ],
)
def test_geforce_cards_reach_their_stated_peak(name: str, size: int, tflops: float) -> None:
    """fp32 accumulation at half rate is not bound by power, as the L40S's full rate is (0.57). Within a quarter: they clock above it."""
    peak = dict(device(name).flops_per_s)["bf16"]
    reached = matmul_efficiency(device(name), "bf16", size, size, size).value * peak / 1e12
    assert 0.75 * tflops < reached <= tflops * 1.02
