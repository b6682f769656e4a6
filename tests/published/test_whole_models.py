"""Tokens and TFLOP/s of whole models that two laboratories published beside the hardware that ran them; fitted to none of them."""

import pytest

from ullage.job.read import read_job
from ullage.timing.step import step_time


@pytest.mark.parametrize(("device", "tflops"), [("H200-SXM-141GB", 461), ("B200-SXM-180GB", 778)])
def test_an_8b_model(device: str, tflops: int) -> None:
    """stas00/ml-engineering@744d01e insights/when-to-upgrade-gpus/README.md: sequences of 8,192 tokens, ZeRO-2, no
    recomputation, no offload. Model FLOPs, the masked half of attention not counted."""
    seq, layers, hidden = 8192, 32, 4096
    job = {
        "model": "llama-3.1-8b",
        "cluster": f"8x{device}",
        "stack": "transformers",
        "engine": {"name": "deepspeed", "zero_stage": 2},
        "precision": {"params": "bf16", "compute": "bf16", "grads": "bf16", "master": "fp32", "reduce": "bf16"},
        "data": {"seq_len": seq, "micro_batch": 1},
        "attention": "flash",
    }
    flops = 6 * 8.03e9 * seq + 6 * layers * hidden * seq**2
    assert flops / step_time(read_job(job)).step_s == pytest.approx(tflops * 1e12, rel=0.08)


@pytest.mark.parametrize(
    ("gpus", "eight_bit", "tokens_per_s"),
    [(8, False, 5762), (128, False, 5605), (128, True, 8380)],
)
def test_torchtitan(gpus: int, eight_bit: bool, tokens_per_s: int) -> None:
    """Tables 1 and 3 of pytorch/torchtitan@31a17bf benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B on H100 of 500 W and 2.4 TB/s,
    whose matmuls were measured elsewhere (data/matmul.toml)."""
    job = {
        "model": "llama-3.1-8b",
        "cluster": "8xH100-SXM-96GB" if gpus == 8 else "16x8xH100-SXM-96GB",
        "stack": "torchtitan",
        "stack_version": "2024-12-26",
        "engine": {"name": "fsdp2", "options": {"float8_recipe": "tensorwise"} if eight_bit else {}},
        "precision": "fp8-mixed" if eight_bit else "bf16-mixed",
        "optimizer": {"name": "adamw", "impl": "foreach"},
        "data": {"seq_len": 8192, "micro_batch": 2},
        "recompute": "selective",
        "attention": "flash",
        "compile": eight_bit,
    }
    assert step_time(read_job(job)).tokens_per_s_per_gpu == pytest.approx(tokens_per_s, rel=0.08)
