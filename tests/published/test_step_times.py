"""Iteration times of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), table 5.

Nothing here was measured with ullage's calibration in mind: shapes, memory and links of an A100 come from micro-benchmarks.
"""

import pytest

from ullage.job.read import read_job
from ullage.timing.step import StepTime, step_time

MODELS = {
    "22B": (6144, 64, 48, 8, 1, 1, 4),
    "175B": (12288, 96, 96, 8, 8, 3, 64),
    "530B": (20480, 128, 105, 8, 35, 3, 280),
    "1T": (25600, 160, 128, 8, 64, 1, 512),
}
"""hidden, heads, layers, tp, pp, vpp, global batch (tables 3 and 4); the micro-batch is 4 for 22B and 1 for the others."""

SECONDS = [
    ("22B", "full", 1.42),
    ("22B", "selective", 1.10),
    ("175B", "full", 18.13),
    ("175B", "selective", 13.75),
    ("530B", "full", 49.05),
]


UTILISATION = [
    ("22B", 1.10, 0.415, 0.437),
    ("175B", 13.75, 0.514, 0.528),
    ("530B", 37.83, 0.560, 0.570),
    ("1T", 71.49, 0.563, 0.570),
]
"""With selective recomputation: seconds, model FLOPs utilisation, hardware FLOPs utilisation."""


def timed(name: str, recompute: str) -> StepTime:
    hidden, heads, layers, tp, pp, vpp, batch = MODELS[name]
    micro = 4 if name == "22B" else 1
    model = {
        "model_type": "gpt", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": hidden // heads, "intermediate_size": 4 * hidden, "vocab_size": 51200,
        "max_position_embeddings": 2048, "position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True,
        "tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    }  # fmt: skip
    job = {
        "model": model,
        "cluster": f"{pp}x8xA100-SXM-80GB",
        "data": {"seq_len": 2048, "micro_batch": micro, "grad_accum": batch // micro},
        "layout": {
            "tp": tp,
            "sp": recompute == "selective",
            "pp": pp,
            "vpp": vpp,
            "schedule": "interleaved-1f1b" if vpp > 1 else "1f1b",
        },
        "engine": {"name": "megatron", "options": {"transformer_impl": "local"}},
        "stack": "megatron",
        "precision": {"params": "fp16", "compute": "fp16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
        "recompute": recompute,
        "attention": "eager",
    }
    return step_time(read_job(job))


@pytest.mark.parametrize(("name", "recompute", "seconds"), SECONDS)
def test_iteration_time(name: str, recompute: str, seconds: float) -> None:
    assert timed(name, recompute).step_s == pytest.approx(seconds, rel=0.065)


@pytest.mark.parametrize(("name", "seconds", "mfu", "hfu"), UTILISATION)
def test_utilisation(name: str, seconds: float, mfu: float, hfu: float) -> None:
    """FLOPs alone: both in the published seconds, which are rounded to a hundredth, are the published utilisation, rounded to 0.1 %.

    The paper's hardware FLOPs have 1 + s / 3 h + v / 12 h L in place of 1 + s / 6 h + v / 12 h L (its section 6.3 and appendix A), which
    is all of attention's FLOPs again, forward and backward. What selective recomputation runs again is its forward, a third of that.
    """
    found = timed(name, "selective")
    ours, again = (one * found.step_s / seconds for one in (found.mfu, found.hfu - found.mfu))
    assert ours == pytest.approx(mfu, rel=0.005 / seconds + 0.0005 / mfu)
    assert ours + 3 * again == pytest.approx(hfu, rel=0.005 / seconds + 0.0005 / hfu)


def test_full_recomputation_runs_every_layer_forward_again() -> None:
    """Korthikanti et al., appendix A, of the layers alone: 96 B L s h^2 (1 + s / 6 h) FLOPs instead of 72, and the head as it was."""
    found = timed("22B", "full")
    seq, hidden, layers, vocab = 2048, 6144, 48, 51200
    of_layers, head = 72 * layers * hidden**2 * (1 + seq / (6 * hidden)), 6 * hidden * vocab
    assert found.hfu / found.mfu == pytest.approx((of_layers * 4 / 3 + head) / (of_layers + head), rel=1e-9)


def test_nothing_is_run_again_without_recomputation() -> None:
    found = timed("22B", "none")
    assert found.hfu == found.mfu
