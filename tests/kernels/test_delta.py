"""Gated DeltaNet: what the kernels of two packages keep in the place of transformers' own code, and where none of it is known."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kernels.layers import layer_keeps

import ullage
from ullage.engines.base import context_of
from ullage.errors import Contradiction, InvalidInput, Unsupported
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels.stacks import lower
from ullage.kernels.step import Step
from ullage.model.build import graph
from ullage.model.count import flops_per_token
from ullage.timing.step import step_time

BATCH, SEQ = 2, 512
TOKENS = BATCH * SEQ
K_HEADS, V_HEADS, K_DIM, V_DIM, TAPS, CHUNK = 4, 8, 64, 32, 4, 64
KEYS, VALUES = K_HEADS * K_DIM, V_HEADS * V_DIM
NEXT = {
    "model_type": "qwen3_next", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "linear_num_key_heads": K_HEADS,
    "linear_num_value_heads": V_HEADS, "linear_key_head_dim": K_DIM, "linear_value_head_dim": V_DIM,
    "layer_types": ["full_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
SMALL = 8192
"""Bytes of what has one element a head, each in an allocation of its own."""


def _job(**keys: Any) -> Any:
    base = {"schema": 1, "model": NEXT, "cluster": "8xH100-SXM-80GB", "engine": {"name": "ddp"}, "precision": "bf16",
            "optimizer": "adamw", "data": {"seq_len": SEQ, "micro_batch": BATCH}}  # fmt: skip
    return read_job({**base, **keys})


def _without(*packages: str) -> dict[str, object]:
    return {"name": "ddp", "options": dict.fromkeys(packages, False)}


def _rule() -> Step:
    job = _job()
    model = graph_of(job)
    block = next(run.block for run in model.runs if run.block.name.endswith("linear"))
    return next(step for step in lower(block, context_of(job, model)) if step.name == "delta_rule")


def test_the_delta_rule_s_kernel_keeps_what_its_function_saves() -> None:
    """fla/ops/gated_delta_rule/chunk.py saves q and k after their norm with an fp32 statistic a head each, v, the decay in fp32, beta and
    A; beta is there for its sigmoid already."""
    step = _rule()
    kept = {buffer.name: buffer.bytes for buffer in step.writes if buffer.name in step.saves}
    narrow = TOKENS * (2 * KEYS + VALUES + V_HEADS * CHUNK)
    assert sum(kept.values()) == 2 * narrow + 4 * TOKENS * (2 * K_HEADS + V_HEADS)
    assert set(step.saves) - set(kept) == {"beta"}


def test_the_delta_rule_s_backward_makes_its_states_again() -> None:
    """chunk_gated_delta_rule_bwd, where prepare_wy_repr_bwd runs: w, u, h, v_new, dh, du and dw, and keys' gradient of each value head
    beside its sum (chunk_delta_h.py, wy_fast.py: new_empty and empty_like of 16-bit tensors)."""
    states = BATCH * (SEQ // CHUNK) * V_HEADS * K_DIM * V_DIM
    of_heads = TOKENS * V_HEADS * K_DIM
    made = sum(buffer.bytes for buffer in _rule().backward_scratch)
    assert made == 2 * (3 * of_heads + 3 * TOKENS * VALUES + 2 * states + TOKENS * KEYS)


def test_the_convolution_s_kernel_keeps_its_input_alone() -> None:
    """causal_conv1d_interface.py saves x; conv1d saves it too, and silu what conv1d gave, with as many tokens more as it has taps before
    the first."""
    apart = layer_keeps(_job(engine=_without("causal_conv1d"))) - layer_keeps(_job())
    assert apart == pytest.approx(2 * BATCH * (2 * KEYS + VALUES) * (SEQ + TAPS - 1), abs=SMALL)


def test_both_are_taken_as_installed() -> None:
    assert {"engine.options.fla = true (taken as installed)"} < set(_job().defaults)
    assert not [one for one in _job(engine=_without("fla", "causal_conv1d")).defaults if "installed" in one]


def test_flops_are_the_forward_s_matmuls() -> None:
    """chunk.py, a token and a head: keys by keys, queries by keys, the inverse by keys and by values, scores by values, and three
    products with a state; a third of forward and backward."""
    counted = flops_per_token(graph(_job().model), SEQ)
    other = flops_per_token(graph(_job(model={**NEXT, "layer_types": ["full_attention"] * 4}).model), SEQ)
    delta = V_HEADS * 2 * (3 * CHUNK * K_DIM + 2 * CHUNK * V_DIM + 3 * K_DIM * V_DIM)
    projections = 2 * 256 * (2 * (KEYS + VALUES) + 2 * V_HEADS + VALUES)
    attention = 2 * 256 * (2 * 4 * 64 + 2 * 2 * 64 + 4 * 64) + 2 * 4 * 2 * 64 * SEQ
    assert counted - other == 2 * 3 * (delta + projections - attention)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"layout": {"tp": 2}, "engine": {"name": "fsdp2"}}, "layout.tp"),
        ({"layout": {"cp": 2}, "engine": {"name": "fsdp2"}}, "layout.cp"),
        ({"engine": {"name": "megatron"}}, "stack"),
        ({"stack": "torchtitan", "engine": {"name": "fsdp2"}}, "stack"),
        ({"precision": "fp32"}, "engine.options.fla"),
    ],
)
def test_what_is_not_modelled_is_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named.replace(".", r"\.")):
        ullage.estimate(_job(**keys))


def test_without_the_kernel_fp32_runs() -> None:
    assert ullage.estimate(_job(precision="fp32", engine=_without("fla"))).verdict == "fits"


@pytest.mark.parametrize("package", ["fla", "causal_conv1d"])
def test_the_packages_are_of_these_models_alone(package: str) -> None:
    llama = {key: value for key, value in NEXT.items() if key != "layer_types"} | {"model_type": "qwen3_moe"}
    with pytest.raises(Contradiction, match=package):
        _job(model=llama, engine={"name": "ddp", "options": {package: True}})


def test_layer_types_are_read() -> None:
    with pytest.raises(InvalidInput, match="layer_types"):
        ullage.estimate(_job(model={**NEXT, "layer_types": ["sliding_attention"] * 4}))


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp2", "deepspeed"])
def test_engines_of_transformers_run_it(engine: str) -> None:
    cluster = "1xH100-SXM-80GB" if engine == "single" else "8xH100-SXM-80GB"
    job = _job(engine={"name": engine}, cluster=cluster, precision="bf16-mixed")
    assert ullage.estimate(job).verdict == "fits"
    assert step_time(job).step_s > 0
