"""Whole layers of experts on 8 H100, one sequence of 4096 tokens, routed evenly by force: NVIDIA/Megatron-LM@d98e8a64
tests/functional_tests/test_cases/common/moe_perf (test_cases.py, and baseline.json in milliseconds, forward and backward).

The baselines are single layers of a GPU that rests between them, whose clock no long run keeps, and the DeepSeek-like ones choose four of
eight groups, so that a token goes to at most four of the ranks: estimates are late there.
"""

from __future__ import annotations

from typing import Any

import pytest

from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.blocks import pass_s
from ullage.timing.ops import block_work
from ullage.timing.step import stages

SHAPE = {"num_hidden_layers": 1, "vocab_size": 1024, "max_position_embeddings": 4096, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": SHAPE | {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 8,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek": SHAPE | {
        "model_type": "gpt", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 896, "position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False, "qkv_bias": False,
        "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "shared_expert_intermediate_size": 2048,
    },
}  # fmt: skip
OPTIONS: dict[str, dict[str, object]] = {
    "a2a": {"moe_token_dispatcher_type": "alltoall"},
    "deepep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
    "hybridep": {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
}
ROUTER = {
    "mixtral": {},
    "deepseek": {
        "moe_router_score_function": "sigmoid", "moe_router_dtype": "fp32", "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 8, "moe_router_group_topk": 4,
    },
}  # fmt: skip
OF_EXPERTS = ("moe", "moe_act", "shared_experts")


def milliseconds(model: str, dispatcher: str, dtype: str) -> tuple[float, float]:
    options = {
        **OPTIONS[dispatcher], **ROUTER[model], "moe_permute_fusion": True, "moe_router_fusion": True,
        "moe_router_force_load_balancing": True, "moe_aux_loss_coeff": 1.0,
    }  # fmt: skip
    if dtype == "fp8":
        options["fp8_recipe"] = "blockwise"
    job = read_job({
        "model": MODELS[model], "cluster": "8xH100-SXM-80GB", "layout": {"dp": 8, "ep": 8}, "stack": "megatron",
        "data": {"seq_len": 4096, "micro_batch": 1}, "engine": {"name": "megatron", "options": options},
        "precision": {"params": "bf16", "compute": dtype, "grads": "bf16", "reduce": "bf16"},
    })  # fmt: skip
    (stage,) = stages(job, graph_of(job))
    block = next(block for block, _, _ in stage.runs[0] if block.role == "layer")
    works = [one for one in block_work(block, stage.context, accumulates=False) if one.module in OF_EXPERTS]
    forward = sum(pass_s(one.forward, stage.place, backward=False) for one in works)
    return 1e3 * forward, 1e3 * sum(pass_s(one.backward, stage.place, backward=True) for one in works)


@pytest.mark.parametrize(
    ("model", "dispatcher", "dtype", "forward", "backward"),
    [
        ("mixtral", "a2a", "bf16", 4.327, 7.684),
        ("mixtral", "deepep", "bf16", 4.636, 7.854),
        ("mixtral", "hybridep", "bf16", 4.343, 7.741),
        ("mixtral", "a2a", "fp8", 3.788, 6.618),
        ("mixtral", "deepep", "fp8", 4.101, 6.827),
        ("mixtral", "hybridep", "fp8", 3.701, 6.572),
        ("deepseek", "a2a", "bf16", 7.119, 10.483),
        ("deepseek", "deepep", "bf16", 5.682, 9.055),
        ("deepseek", "hybridep", "bf16", 5.391, 8.795),
        ("deepseek", "a2a", "fp8", 7.609, 10.126),
        ("deepseek", "deepep", "fp8", 6.035, 8.602),
        ("deepseek", "hybridep", "fp8", 5.143, 7.687),
    ],
)
def test_a_layer_of_experts(model: str, dispatcher: str, dtype: str, forward: float, backward: float) -> None:
    late = 1.40 if model == "deepseek" else 1.15
    for found, measured in zip(milliseconds(model, dispatcher, dtype), (forward, backward), strict=True):
        assert 0.82 * measured < found < late * measured
