"""What options tell of old software, and what that costs."""

import pytest

from ullage.calibration.matmul import early_library
from ullage.engines.base import context_of
from ullage.hardware.catalogue import device
from ullage.job.read import read_job
from ullage.model.build import graph as build
from ullage.timing.machine import matmul_s, traffic_s
from ullage.timing.ops import block_work
from ullage.timing.vintage import cuda_of, norms_early, of_2021, of_2022, of_2023
from ullage.timing.work import Matmul, Traffic

JOB = {
    "model": {
        "model_type": "gpt", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 1, "vocab_size": 50304,
        "intermediate_size": 4096, "max_position_embeddings": 2048, "norm": "layernorm",
    },
    "cluster": "8xA100-SXM-80GB",
    "stack": "megatron",
    "layout": {"dp": 8},
    "data": {"seq_len": 2048, "micro_batch": 1},
}  # fmt: skip
MPT = {"norm_type": "low_precision_layernorm"}


def test_what_is_told_by_an_options_name() -> None:
    assert [of_2021(one) for one in ({"DDP_impl": "local"}, {})] == [True, False]
    assert [of_2022(one) for one in ({"checkpoint_activations": True}, {})] == [True, False]
    assert [of_2023(one) for one in (MPT, {"norm_type": "rmsnorm"})] == [True, False]
    assert [norms_early(one) for one in ({"DDP_impl": "local"}, {"checkpoint_activations": True}, {})] == [
        True,
        True,
        False,
    ]
    assert cuda_of({}, "megatron") == ""
    assert cuda_of({"checkpoint_activations": True}, "megatron") == "11.6"
    assert cuda_of({"checkpoint_activations": True}, "transformers") == ""
    assert cuda_of(MPT | {"mixed_precision": "PURE"}, "transformers") == "11.7"
    assert cuda_of(MPT | {"mixed_precision": "DEFAULT"}, "transformers") == "12.1"


@pytest.mark.parametrize(("m", "tflops"), [(2048, 742.7), (4096, 549.5), (8192, 542.9)])
def test_hopper_in_2023(m: int, tflops: float) -> None:
    """pytorch/pytorch#100850: single shapes scatter about their mean, which is what is taken."""
    gpu = device("H100-SXM-80GB")
    work = Matmul(m=m, n=8192, k=8192, dtype="bf16", cuda="12.1")
    assert work.flops / matmul_s(gpu, work) == pytest.approx(tflops * 1e12, rel=0.21)


def test_only_what_was_measured_is_slower() -> None:
    ampere, hopper = device("A100-SXM-80GB"), device("H100-SXM-80GB")
    assert early_library(ampere, "bf16", "11.7").value == early_library(ampere, "bf16", "11.6").value < 1
    assert early_library(ampere, "bf16", "12.1").value == early_library(ampere, "fp16", "11.7").value == 1
    assert (
        early_library(hopper, "fp8", "12.1").value == early_library(device("B200-SXM-180GB"), "bf16", "12.1").value == 1
    )


@pytest.mark.parametrize(("passes", "backward", "us"), [(2, False, 75.1), (3, True, 176.2)])
def test_the_first_norms(passes: int, backward: bool, us: float) -> None:
    """NVIDIA/apex#1037, on GA100 (1,555 GB/s): 32 x 512 rows of 1,024 in fp16, read and written; x, dy and dx in the backward."""
    work = Traffic(bytes=passes * 32 * 512 * 1024 * 2, kind="early_norm_backward" if backward else "early_norm")
    assert traffic_s(device("A100-SXM-40GB"), work, backward=backward) == pytest.approx(us * 1e-6, rel=0.05)


def kinds(options: dict) -> set[tuple[str, str]]:
    """Of the norms of a layer, forward and backward."""
    job = read_job(JOB | {"engine": {"name": "megatron", "options": options}})
    graph = build(job.model)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    norms = [one for one in block_work(layer, context_of(job, graph)) if "norm" in one.name]
    return {(one.forward.traffic[0].kind, one.backward.traffic[0].kind) for one in norms}


def test_old_options_mean_old_norms() -> None:
    assert kinds({"DDP_impl": "local"}) == {("early_norm", "early_norm_backward")}
    assert kinds({}) == {("norm", "norm")}
