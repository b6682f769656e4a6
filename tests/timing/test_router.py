"""The router of Megatron's mixtures."""

from __future__ import annotations

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.ops import block_work
from ullage.timing.work import OpWork

TOKENS, HIDDEN, FFN, TOP_K = 1024, 2880, 2880, 4
JOB = {
    "model": {
        "model_type": "gpt_oss",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 128,
        "num_experts_per_tok": TOP_K,
        "sliding_window": 128,
    },
    "cluster": "8xB200-SXM-180GB",
    "stack": "megatron",
    "layout": {"dp": 8, "ep": 8},
    "data": {"seq_len": TOKENS, "micro_batch": 1},
}


def _works(**options: object) -> dict[str, OpWork]:
    job = read_job(JOB | {"engine": {"name": "megatron", "zero_stage": 1, "options": options}})
    graph = graph_of(job)
    layer = next(block for block in graph.blocks() if block.role == "layer")
    return {work.name: work for work in block_work(layer, context_of(job, graph))}


def _types(work: OpWork) -> list[str]:
    return [one.dtype for one in (*work.forward.matmuls, *work.backward.matmuls)]


def test_logits_of_fp32_are_multiplied_from_16_bits_forward_and_in_tf32_back() -> None:
    """moe_utils.py, RouterGatingLinearFunction: the input cast up for the weight's gradient, its own gradient cast down."""
    router = _works(moe_router_dtype="fp32")["router"]
    assert _types(router) == ["bf16", "tf32", "tf32"]
    assert [one.bytes for one in router.backward.traffic] == [6 * TOKENS * HIDDEN] * 2


def test_logits_of_16_bits_are_multiplied_in_16_bits() -> None:
    router = _works()["router"]
    assert _types(router) == ["bf16"] * 3
    assert not router.backward.traffic
