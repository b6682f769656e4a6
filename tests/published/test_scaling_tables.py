"""The weak-scaling table of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473),
table 1; micro-batches and model chunks from Megatron-LM's examples/sc21/run_table_1.sh.

What a table of layouts is read for is the order of its rows, which is held here beside their size.
"""

from itertools import combinations

import pytest

from ullage.job.read import read_job
from ullage.timing.step import step_time

ROWS = {
    # hidden, heads, layers, tp, pp, model chunks, dp, micro-batch, micro-batches: TFLOP/s of a GPU, recomputation counted
    (3072, 32, 30, 2, 1, 1, 32, 16, 1): 138,
    (4096, 32, 36, 4, 1, 1, 32, 16, 1): 142,
    (6144, 48, 40, 8, 1, 1, 32, 8, 4): 135,
    (8192, 64, 48, 8, 2, 1, 32, 4, 12): 138,
    (10240, 80, 60, 8, 4, 3, 32, 2, 28): 140,
    (16384, 128, 96, 8, 16, 2, 15, 1, 144): 155,
    (20480, 128, 105, 8, 35, 3, 9, 1, 280): 163,
}
SEQ = 2048


def seconds(row: tuple[int, ...]) -> float:
    hidden, heads, layers, tp, pp, vpp, dp, micro, accum = row
    model = {
        "model_type": "gpt", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": hidden // heads, "intermediate_size": 4 * hidden, "vocab_size": 51200,
        "max_position_embeddings": SEQ, "position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True,
        "tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    }  # fmt: skip
    job = {
        "model": model,
        "cluster": f"{tp * pp * dp // 8}x8xA100-SXM-80GB",
        "data": {"seq_len": SEQ, "micro_batch": micro, "grad_accum": accum},
        "layout": {"dp": dp, "tp": tp, "pp": pp, "vpp": vpp, "schedule": "interleaved-1f1b" if vpp > 1 else "1f1b"},
        "engine": {"name": "megatron", "options": {"transformer_impl": "local", "DDP_impl": "local"}},
        "stack": "megatron",
        "precision": {"params": "fp16", "compute": "fp16", "grads": "fp16", "master": "fp32", "reduce": "fp16"},
        "recompute": "full",
        "attention": "eager",
    }
    return step_time(read_job(job)).step_s


def flops_per_s(row: tuple[int, ...], step_s: float) -> float:
    """The paper's equation 3."""
    hidden, _, layers, tp, pp, _, dp, micro, accum = row
    tokens = SEQ * micro * accum * dp
    flops = 96 * tokens * layers * hidden**2 * (1 + SEQ / (6 * hidden) + 51200 / (16 * layers * hidden))
    return flops / step_s / (tp * pp * dp)


def tau(one: list[float], other: list[float]) -> float:
    """Kendall's."""
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in combinations(range(len(one)), 2)]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(signs)


def test_the_order_of_the_rows() -> None:
    predicted = [flops_per_s(row, seconds(row)) for row in ROWS]
    assert tau(predicted, list(ROWS.values())) >= 0.8


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_size_of_a_row(row: tuple[int, ...]) -> None:
    assert flops_per_s(row, seconds(row)) == pytest.approx(ROWS[row] * 1e12, rel=0.14)
