"""Offload to the host as it was published. One rate describes all sizes of an optimizer; a step was measured by another project."""

import pytest

from ullage.calibration.host import HostOptimizer, host_optimizer_bytes_per_s
from ullage.hardware.catalogue import device
from ullage.job.read import read_job
from ullage.timing.step import step_time

ADAM = [
    ("fused", 28, {1e9: 0.22, 2e9: 0.51, 4e9: 1.03, 8e9: 2.41, 10e9: 2.57}),
    ("foreach", 80, {1e9: 1.39, 2e9: 2.75, 4e9: 5.71, 8e9: 11.93, 10e9: 14.76}),
]
"""Ren et al., "ZeRO-Offload" (arXiv 2101.06840), latency of CPU-Adam and of PyTorch's Adam on the CPUs of a DGX-2, by parameters."""


@pytest.mark.parametrize(("impl", "moved", "seconds"), ADAM)
def test_adam_on_the_cpus_of_a_dgx_2(impl: HostOptimizer, moved: int, seconds: dict[float, float]) -> None:
    rate = host_optimizer_bytes_per_s(device("V100-SXM-32GB"), impl, 16)
    assert rate.provenance == "measured"
    assert {numel: numel * moved / rate.value for numel in seconds} == pytest.approx(seconds, rel=0.18)


def test_a_llama_of_70_billion_parameters_under_cpu_offload() -> None:
    """torchtune's README: 1,568 tokens/s of 8 A100, full fine-tuning in bf16, batch 2 of 2,048 tokens, fused AdamW on the CPUs."""
    job = {
        "model": "llama-3.1-70b",
        "cluster": "8xA100-SXM-80GB",
        "data": {"seq_len": 2048, "micro_batch": 2},
        "engine": {"name": "fsdp2", "options": {"custom_sharded_layers": ["tok_embeddings", "output"]}},
        "stack": "torchtune",
        "precision": "bf16",
        "optimizer": {"name": "adamw", "impl": "fused", "state": "bf16"},
        "grad_clip": False,
        "recompute": "full",
        "loss": {"kind": "chunked", "chunks": 8},
        "offload": {"optimizer": "cpu", "params": "cpu"},
        "compile": True,
    }
    assert 8 * step_time(read_job(job)).tokens_per_s_per_gpu == pytest.approx(1568, rel=0.15)
