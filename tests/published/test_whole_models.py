"""TFLOP/s of an 8B model on eight GPUs: stas00/ml-engineering@744d01e insights/when-to-upgrade-gpus/README.md (sequences of 8,192 tokens,
ZeRO-2, no recomputation, no offload). Model FLOPs, the masked half of attention not counted.
"""

import pytest

from ullage.job.read import read_job
from ullage.timing.step import step_time


@pytest.mark.parametrize(("device", "tflops"), [("H200-SXM-141GB", 461), ("B200-SXM-180GB", 778)])
def test_an_8b_model(device: str, tflops: int) -> None:
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
