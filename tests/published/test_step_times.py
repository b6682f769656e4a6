"""Iteration times of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), table 5.

Nothing here was measured with ullage's calibration in mind: shapes, memory and links of an A100 come from micro-benchmarks.
"""

import pytest

from ullage.job.read import read_job
from ullage.timing.step import step_time

MODELS = {
    "22B": (6144, 64, 48, 8, 1, 1, 4),
    "175B": (12288, 96, 96, 8, 8, 3, 64),
    "530B": (20480, 128, 105, 8, 35, 3, 280),
}
"""hidden, heads, layers, tp, pp, vpp, global batch (tables 3 and 4); the micro-batch is 4 for 22B and 1 for the others."""

SECONDS = [
    ("22B", "full", 1.42),
    ("22B", "selective", 1.10),
    ("175B", "full", 18.13),
    ("175B", "selective", 13.75),
    ("530B", "full", 49.05),
]


@pytest.mark.parametrize(("name", "recompute", "seconds"), SECONDS)
def test_iteration_time(name: str, recompute: str, seconds: float) -> None:
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
    assert step_time(read_job(job)).step_s == pytest.approx(seconds, rel=0.065)
