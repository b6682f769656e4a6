"""Which attention kernel a job's seconds are those of."""

import pytest

from ullage.job.read import read_job
from ullage.timing.attention import attention_kernel
from ullage.timing.step import step_time

LLAMA = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "megatron",
    "engine": {"name": "megatron"},
    "layout": {"dp": 8},
    "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
    "data": {"seq_len": 8192, "micro_batch": 1},
}
TITAN = {"stack": "torchtitan", "engine": {"name": "fsdp2"}, "precision": "bf16-mixed"}
MPT = {
    "stack": "transformers",
    "precision": "bf16-mixed",
    "engine": {"name": "fsdp1", "options": {"norm_type": "low_precision_layernorm"}},
}


def kernel(**changes) -> str:
    return attention_kernel(read_job(LLAMA | changes))


def backend(name: str) -> dict:
    return {"engine": {"name": "megatron", "options": {"attention_backend": name}}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "cudnn"),
        ({"cluster": "8xB200-SXM-180GB"}, "cudnn"),
        ({"cluster": "8xA100-SXM-80GB"}, "flash"),
        ({"cluster": "8xMI300X-192GB"}, "flash"),
        (backend("flash"), "flash-2"),
        (backend("fused"), "cudnn"),
        (TITAN, "cudnn"),
        (TITAN | {"stack_version": "2025-10-09"}, "cudnn"),
        (TITAN | {"stack_version": "2025-10-08"}, "flash"),
        (TITAN | {"stack_version": "2025-05-14", "cluster": "8xB200-SXM-180GB"}, "cudnn"),
        (TITAN | {"cluster": "8xV100-SXM-32GB"}, "flash"),
        (TITAN | {"stack_version": "2025-03-20"}, "flash"),
        (TITAN | {"stack_version": "2024-12-26"}, "flash-built-in"),
        (MPT, "triton"),
        ({"attention": "eager"}, "eager"),
    ],
)
def test_the_kernel_is_the_stacks_own(changes: dict, expected: str) -> None:
    assert kernel(**changes) == expected


@pytest.mark.parametrize("cluster", ["8xA100-SXM-80GB", "8xH100-SXM-80GB"])
def test_attention_in_triton_takes_about_twice_as_long(cluster: str) -> None:
    """FlashAttention-2 against 1 in Triton, causal, 16k: 189 and 80 TFLOP/s on an A100 (flash2_a100_fwd_bwd_benchmark.png)."""
    data = {"cluster": cluster, "data": {"seq_len": 16384, "micro_batch": 1}, "recompute": "none"}
    flash = MPT | {"engine": {"name": "fsdp1"}}
    old, new = (dict(step_time(read_job(LLAMA | stack | data)).parts)["attention"] for stack in (MPT, flash))
    assert old / new == pytest.approx(189 / 80, rel=0.06)
