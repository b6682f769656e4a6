"""torchtitan's graph_trainer against the graphs that its own code makes, and against the runs that its commits tell of.

Traced: pytorch/torchtitan@27aa490, Llama 3 8B, 32 layers of 8192 tokens, a fake process group, on torch 2.13 (CPU, fake tensors; RMSNorm
as one op, as on CUDA). Its passes up to bucketing were applied, and each tensor was counted from the node that makes its storage to the
last that reads it.
"""

import pytest

from ullage.api import estimate
from ullage.engines.base import context_of
from ullage.engines.fsdp2.captured import as_run
from ullage.engines.registry import account, ranks_of
from ullage.errors import Infeasible, Unsupported
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels.stacks import segments
from ullage.units import GIB

WORDS = {"full": "full", "default": "selective", "eager": "selective"}


def job(policy: str | None, *, tp: int = 1, **options: object) -> dict:
    said = {} if policy is None else {"memory_policy": policy}
    return {
        "model": "llama-3.1-8b",
        "cluster": "8xH100-SXM-96GB",
        "data": {"seq_len": 8192, "micro_batch": 1},
        "layout": {"dp": 8 // tp, "tp": tp, "sp": tp > 1},
        "engine": {"name": "fsdp2", "options": {"graph_trainer": True, "expandable_segments": True, **said, **options}},
        "stack": "torchtitan",
        "stack_version": "2026-06-02",
        "precision": "bf16-mixed",
        "recompute": "none" if policy is None else WORDS[policy],
        "loss": "vocab-parallel" if tp > 1 else "full",
        "compile": True,
    }


def graph_bytes(said: dict) -> int:
    """What the step needs beside weights and moments."""
    read = read_job(said)
    graph = graph_of(read)
    (rank,) = ranks_of(read, graph)
    return account(read, graph, rank).step.peak_bytes


@pytest.mark.parametrize(
    ("policy", "tp", "traced_gib"),
    [
        ("full", 1, 17.221),
        ("default", 1, 35.877),
        (None, 1, 67.004),
        ("full", 2, 8.642),
        ("default", 2, 17.970),
        (None, 2, 35.596),
    ],
)
def test_a_graph_of_torchtitans(policy: str | None, tp: int, traced_gib: float) -> None:
    """None: without the pass that marks ops, all stays that a backward reads, gathered weights too."""
    assert graph_bytes(job(policy, tp=tp)) / GIB == pytest.approx(traced_gib, rel=0.025)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "vocab_size": 102400,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
}


@pytest.mark.parametrize(("policy", "traced_gib"), [("full", 19.449), ("default", 23.434)])
def test_a_graph_with_experts(policy: str, traced_gib: float) -> None:
    """DeepSeek V3 16B's first three layers, eight ranks of experts, four sequences of 4096, as many rows back from each all-to-all as sent:
    flex attention, all-to-alls saved by default, grouped matmuls run again."""
    said = job(policy) | {"model": DEEPSEEK, "data": {"seq_len": 4096, "micro_batch": 4}, "layout": {"dp": 8, "ep": 8}}
    assert graph_bytes(said) / GIB == pytest.approx(traced_gib, rel=0.025)


@pytest.mark.parametrize(
    ("policy", "tp", "reserved_gib"),
    [("default", 2, 30.92), ("full", 2, 20.70), ("default", 1, 52.44), ("full", 1, 32.07)],
)
def test_a_run_of_torchtitans(policy: str, tp: int, reserved_gib: float) -> None:
    """Commit 27aa490's table: maximum reserved memory of Llama 3 8B on eight H100."""
    assert estimate(read_job(job(policy, tp=tp))).peak.reserved_bytes / GIB == pytest.approx(reserved_gib, rel=0.06)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("full", {"context", "lse"}),
        ("default", {"context", "lse", "q", "k", "v", "attention_out", "gate", "up"}),
        ("eager", {"context", "lse", "q", "v", "gate"}),
    ],
)
def test_what_a_layer_keeps(policy: str, kept: set[str]) -> None:
    """Of each of the 32 traced layers: attention's output and statistics (dropout could make it random, so it is never run again); by
    default the matmuls too, but for the last, which only the layer's own output is made of."""
    run = as_run(read_job(job(policy)))
    graph = graph_of(run)
    (layer,) = [run.block for run in graph.runs if run.block.role == "layer"]
    (found,) = segments(layer, context_of(run, graph), run.recompute)
    assert found.keep == kept


def test_flex_attention_is_run_again_under_the_full_policy() -> None:
    """An op of higher order is not marked as random (memory_policy.py, _make_full_memory_policy): a log-sum and an output a layer less."""
    layers, a_layer = 32, 8192 * (4096 * 2 + 32 * 4)
    less = graph_bytes(job("full")) - graph_bytes(job("full", attention_backend="flex"))
    assert less == layers * a_layer


@pytest.mark.parametrize(("version", "again"), [("2026-04-28", False), ("2026-05-01", True), (None, True)])
def test_weights_are_gathered_again_since_april(version: str | None, again: bool) -> None:
    """Commit 9ed1a028d; before, the default policy saved what was gathered, whatever reshard_after_forward said."""
    since = graph_bytes(job("default") | {"stack_version": version})
    kept = graph_bytes(job("default", reshard_after_forward="never"))
    assert (since < kept) is again
    assert again or since == kept


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"stack_version": "2026-02-26"}, "graph_trainer"),
        ({"stack_version": "2026-04-23"}, "graph_trainer"),
        ({"stack_version": "2026-03-13", "model": DEEPSEEK}, "graph_trainer"),
        ({"layout": {"dp": 4, "pp": 2}}, "graph_trainer"),
        ({"data": {"seq_len": 8192, "micro_batch": 1, "grad_accum": 2}}, "graph_trainer"),
        ({"recompute": {"every": 2}}, "memory_policy"),
        ({"recompute": "none"}, "memory_policy"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(change: dict, key: str) -> None:
    with pytest.raises((Unsupported, Infeasible), match=key):
        estimate(read_job(job("full") | change))


def test_a_policy_that_nobody_traced_is_refused() -> None:
    with pytest.raises(Unsupported, match="memory_policy = sac_and_offload"):
        estimate(read_job(job(None, memory_policy="sac_and_offload")))


SIMPLE = {"simple_fsdp": True, "compile_backend": "aot_eager", "compile_loss": True}


@pytest.mark.parametrize(("gpus", "tp", "reserved_gib"), [(8, 1, 40.96), (8, 2, 28.28), (64, 1, 29.37)])
def test_a_run_of_simple_fsdp(gpus: int, tp: int, reserved_gib: float) -> None:
    """Commit d9bdfbb's table, November 2025: one sequence of 8192 a rank, selective checkpointing by op."""
    said = job("eager", tp=tp) | {"stack_version": "2025-11-15"}
    said["engine"] = {"name": "fsdp2", "options": {"expandable_segments": True, **SIMPLE}}
    if gpus == 64:
        said |= {"cluster": "8x8xH100-SXM-96GB", "layout": {"dp": 64}}
    assert estimate(read_job(said)).peak.reserved_bytes / GIB == pytest.approx(reserved_gib, rel=0.065)


@pytest.mark.parametrize("reserved_gib", [28.54, 28.09])
def test_a_graph_that_was_cut(reserved_gib: float) -> None:
    """Commit fca8ab7's Llama 3 8B in mode "aot", March 2026: marked by checkpointing in eager mode, and by the pass that took its place."""
    said = job("default", tp=2) | {"stack_version": "2026-03-13"}
    assert estimate(read_job(said)).peak.reserved_bytes / GIB == pytest.approx(reserved_gib, rel=0.04)


@pytest.mark.parametrize(
    ("change", "options", "key"),
    [
        ({"recompute": "none"}, {}, "recompute"),
        ({}, {"compile_backend": "inductor"}, "simple_fsdp"),
        ({"model": DEEPSEEK}, {}, "simple_fsdp"),
    ],
)
def test_what_simple_fsdp_leaves_to_the_compiler_is_refused(change: dict, options: dict, key: str) -> None:
    said = job("eager") | {"stack_version": "2025-11-15"} | change
    said["engine"] = {"name": "fsdp2", "options": {**SIMPLE, **options}}
    with pytest.raises(Unsupported, match=key):
        estimate(read_job(said))


def test_other_engines_have_no_graph_trainer() -> None:
    said = job("full")
    said["engine"] = {"name": "ddp", "options": {"graph_trainer": True}}
    with pytest.raises(Unsupported, match="graph_trainer"):
        estimate(read_job(said))
