"""What a backward does without where weights are frozen."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels import stacks
from ullage.kernels.step import Step


def _layers(**keys: object) -> list[tuple[Step, ...]]:
    """The steps of the first layer, and of the others."""
    job = read_job(
        {
            "schema": 1,
            "model": "llama-3.2-1b",
            "cluster": "1xA100-SXM-80GB",
            "engine": {"name": "single"},
            "data": {"seq_len": 128},
            "precision": "bf16",
            "lora": {"rank": 8, "targets": ["q_proj"], "dtype": "bf16"},
            **keys,
        }
    )
    graph = graph_of(job)
    context = context_of(job, graph)
    return [stacks.lower(run.block, context) for run in graph.runs if run.block.role == "layer"]


def _named(steps: tuple[Step, ...], name: str) -> Step:
    return next(step for step in steps if step.name == name)


def test_a_frozen_linear_saves_no_input() -> None:
    _, steps = _layers()
    assert _named(steps, "down_proj").saves == ()
    assert _named(steps, "q_proj.lora_A").saves == ("attention_in",)


def test_a_frozen_norm_keeps_what_its_input_s_gradient_needs() -> None:
    _, steps = _layers()
    saved = {name for step in steps for name in step.saves}
    assert "input_norm.fp32" in saved
    assert "input_norm.narrow" not in saved


def test_nothing_before_the_first_adapter_is_saved() -> None:
    first, _ = _layers()
    before = first[: first.index(_named(first, "q_proj.lora_A"))]
    assert not any(step.saves for step in before)


@pytest.mark.parametrize("lora", [None, {"rank": 8, "targets": ["q_proj"], "dtype": "bf16"}])
def test_only_what_is_trained_has_gradients(lora: dict[str, object] | None) -> None:
    weights = {weight.param for steps in _layers(lora=lora) for step in steps for weight in step.weights}
    if lora:
        assert weights == {"q_proj.lora_A", "q_proj.lora_B"}
    else:
        assert "down_proj.weight" in weights
