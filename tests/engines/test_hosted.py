"""torchao's CPUOffloadOptimizer on one device, by its code and its README (torchao/optim/README.md, "Optimizer CPU offload")."""

from __future__ import annotations

import pytest

from ullage.api import estimate
from ullage.calibration.host import host_bytes_per_s, host_optimizer_bytes_per_s
from ullage.errors import Contradiction
from ullage.job.read import read_job
from ullage.timing.step import step_time

HIDDEN, LAYERS = 1024, 8
MODEL = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": LAYERS,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LINEARS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * 4096) + 2 * 32768 * HIDDEN
"""Elements of all matrices, each of as many bytes in bf16 as a power of two has; norms have fewer elements than go."""
NORMS = (2 * LAYERS + 1) * HIDDEN


def job(offload: str = "cpu", **options: object) -> dict:
    return {
        "model": MODEL,
        "cluster": "1xA100-SXM-80GB",
        "data": {"seq_len": 512},
        "engine": {"name": "single", "options": options},
        "precision": "bf16",
        "optimizer": {"name": "adamw", "impl": "fused", "state": "bf16"},
        "grad_clip": False,
        "recompute": "full",
        "offload": {"optimizer": offload},
    }


def test_the_gpu_has_less_by_the_states() -> None:
    """ "This will reduce GPU memory usage by optimizer state size": of what has 4096 elements or more."""
    whole, hosted = (estimate(read_job(job(place))) for place in ("none", "cpu"))
    assert whole.peak.allocated_bytes - hosted.peak.allocated_bytes == pytest.approx(4 * LINEARS, rel=1e-3)
    assert sum(line.bytes for line in hosted.ledger if line.category == "optimizer") == pytest.approx(
        4 * NORMS, rel=0.2
    )


def test_the_host_has_twice_the_model_and_the_states() -> None:
    """ "expect your RAM usage to increase by 2x model size + optimizer state": copies and gradients, 2 + 2 + 4 B an element."""
    assert estimate(read_job(job())).host_bytes == pytest.approx(8 * LINEARS, rel=1e-4)


def test_offloaded_gradients_are_dropped_one_by_one() -> None:
    """Of 1.1 billion parameters "ao" has 5.24 GB and "ao (offload gradients)" 4.01: half a copy of them less, for it peaks elsewhere."""
    kept, dropped = (estimate(read_job(job(**options))) for options in ({}, {"offload_gradients": True}))
    freed = kept.peak.allocated_bytes - dropped.peak.allocated_bytes
    assert 0.4 * 2 * LINEARS < freed < 2 * LINEARS


def test_the_step_is_the_hosts_and_copies_run_beside_it() -> None:
    """A gradient, two weights and four moments of 2 B through the memory; all cores, for there is one process."""
    read = read_job(job())
    device = read.cluster.device
    stepped_s = 14 * (LINEARS + NORMS) / host_optimizer_bytes_per_s(device, "fused", 1).value
    assert stepped_s > 2 * LINEARS / host_bytes_per_s(device, "h2d").value
    parts = dict(step_time(read).parts)
    assert parts["optimizer"] == pytest.approx(stepped_s)


def test_gradients_that_are_dropped_do_not_accumulate() -> None:
    with pytest.raises(Contradiction, match="offload_gradients"):
        read_job(job(offload_gradients=True) | {"data": {"seq_len": 512, "grad_accum": 2}})
    with pytest.raises(Contradiction, match=r"offload\.optimizer"):
        read_job(job("none", offload_gradients=True))
