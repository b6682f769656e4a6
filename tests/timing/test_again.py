"""What a backward runs again: by the policies' own rules (torchtitan distributed/activation_checkpoint.py, torch/utils/checkpoint.py)."""

from __future__ import annotations

import pytest

from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.stage import Stage
from ullage.timing.step import stages, step_time

TITAN = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "torchtitan",
    "stack_version": "2024-12-26",
    "engine": {"name": "fsdp2"},
    "data": {"seq_len": 4096, "micro_batch": 1},
}
MATMULS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
SAVED = {"q_proj", "v_proj", "gate_proj", "down_proj"}  # every second one


def _again(**changes: object) -> tuple[Stage, set[str], set[str]]:
    """A stage, and of a layer's ops those whose matmuls or attention run again, and those whose exchanges do."""
    job = read_job(TITAN | changes)
    (stage,) = stages(job, graph_of(job))
    layer = next(one for one in stage.elements[0] if one.block.role == "layer")
    works = stage.again(layer)
    computed = {one.name for one in works if one.forward.matmuls or one.forward.attention}
    return stage, computed, {one.name for one in works if one.forward.exchanges}


@pytest.mark.parametrize("compile", [False, True])
def test_a_policy_by_op_keeps_attention_and_every_second_matmul(compile: bool) -> None:
    assert _again(recompute="selective", compile=compile)[1] == MATMULS - SAVED


@pytest.mark.parametrize(
    ("version", "compile", "last"), [("2024-12-26", False, False), ("2025-09-11", False, True), ("2025-09-11", True, False)]
)  # fmt: skip
def test_a_checkpoint_runs_as_far_as_is_needed(version: str, compile: bool, last: bool) -> None:
    """Nothing reads the down projection's output: early stop and the compiler leave it out, torchtitan since 2025-08-29 does not."""
    computed = _again(recompute="full", stack_version=version, compile=compile)[1]
    assert computed == MATMULS - (set() if last else {"down_proj"}) | {"attention"}


@pytest.mark.parametrize(("compile", "last"), [(False, False), (True, True)])
def test_a_checkpoint_of_what_is_compiled_runs_to_its_end(compile: bool, last: bool) -> None:
    """torchtune's recipes compile each layer first (training/_compile.py), then wrap it in a checkpoint."""
    changes = {
        "stack": "torchtune",
        "stack_version": "2024-09-24",
        "precision": "bf16",
        "loss": {"kind": "chunked", "chunks": 8},
    }
    computed = _again(recompute="full", compile=compile, **changes)[1]
    assert computed == MATMULS - (set() if last else {"down_proj"}) | {"attention"}


def test_kept_results_are_not_sent_again() -> None:
    """Scattered outputs are kept, and with them the matmul before; inputs are gathered again, if only for k and up."""
    layout = {"dp": 2, "tp": 4, "sp": True}
    _, computed, sent = _again(recompute="selective", layout=layout, compile=True)
    assert computed == {"k_proj", "up_proj"}
    assert sent == {"q_proj", "gate_proj"}


def test_what_ranks_have_reduced_is_not_reduced_again() -> None:
    """transformers' layers under the same policy: the output projection's matmul runs again, its all-reduce does not."""
    layout = {"dp": 2, "tp": 4}
    _, computed, sent = _again(recompute="selective", stack="transformers", stack_version=None, layout=layout)
    assert computed == MATMULS - SAVED
    assert not sent
    assert _again(recompute="full", stack="transformers", stack_version=None, layout=layout)[2] == {"o_proj"}


def test_megatron_runs_all_of_a_checkpoint_and_whole_modules() -> None:
    megatron = {"stack": "megatron", "stack_version": None, "engine": {"name": "megatron"}, "precision": "bf16"}
    fused = {"qkv", "attention", "o_proj", "gate_up", "down_proj"}
    assert _again(**megatron, recompute="full")[1] == fused
    assert _again(**megatron, recompute={"modules": ["core_attn"]})[1] == {"attention"}


def test_hardware_flops_count_what_runs_again() -> None:
    job = read_job(TITAN | {"recompute": "selective"})
    time, whole = step_time(job), step_time(read_job(TITAN | {"recompute": "full"}))
    shapes = {"k_proj": 1024 * 4096, "o_proj": 4096 * 4096, "up_proj": 14336 * 4096}
    again = 2 * 32 * sum(shapes.values()) / graph_flops(job)
    assert time.hfu / time.mfu == pytest.approx(1 + again, rel=1e-6)
    assert whole.hfu / whole.mfu > time.hfu / time.mfu


def graph_flops(job: object) -> float:
    from ullage.model.count import flops_per_token

    return flops_per_token(graph_of(job), 4096)  # type: ignore[arg-type]
