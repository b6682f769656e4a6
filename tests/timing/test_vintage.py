"""What options tell of old software, and what that costs."""

import pytest

from ullage.calibration.matmul import early_library
from ullage.hardware.catalogue import device
from ullage.timing.machine import matmul_s
from ullage.timing.vintage import cuda_of, of_2021, of_2022, of_2023
from ullage.timing.work import Matmul

MPT = {"norm_type": "low_precision_layernorm"}


def test_what_is_told_by_an_options_name() -> None:
    assert [of_2021(one) for one in ({"DDP_impl": "local"}, {})] == [True, False]
    assert [of_2022(one) for one in ({"checkpoint_activations": True}, {})] == [True, False]
    assert [of_2023(one) for one in (MPT, {"norm_type": "rmsnorm"})] == [True, False]
    assert cuda_of({}) == ""
    assert cuda_of({"checkpoint_activations": True}) == "11.6"
    assert cuda_of(MPT | {"mixed_precision": "PURE"}) == "11.7"
    assert cuda_of(MPT | {"mixed_precision": "DEFAULT"}) == "12.1"


@pytest.mark.parametrize(("m", "tflops"), [(2048, 742.7), (4096, 549.5), (8192, 542.9)])
def test_hopper_in_2023(m: int, tflops: float) -> None:
    """pytorch/pytorch#100850: single shapes scatter about their mean, which is what is taken."""
    gpu = device("H100-SXM-80GB")
    work = Matmul(m=m, n=8192, k=8192, dtype="bf16", cuda="12.1")
    assert work.flops / matmul_s(gpu, work) == pytest.approx(tflops * 1e12, rel=0.21)


def test_only_what_was_measured_is_slower() -> None:
    ampere, hopper = device("A100-SXM-80GB"), device("H100-SXM-80GB")
    assert early_library(ampere, "bf16", "11.7").value < 1
    assert early_library(ampere, "bf16", "12.1").value == early_library(ampere, "fp16", "11.7").value == 1
    assert (
        early_library(hopper, "fp8", "12.1").value == early_library(device("B200-SXM-180GB"), "bf16", "12.1").value == 1
    )
