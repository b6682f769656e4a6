"""What CUDA graphs of attention keep, by the rules of Megatron-Core and Transformer Engine (engines/megatron/graphs.py)."""

import pytest

import ullage
from ullage.job.read import read_job

SEQ, BATCH, HIDDEN = 1024, 2, 2048
JOB = {
    "model": {"base": "llama-3.2-1b", "num_hidden_layers": 16},
    "cluster": "8xH100-SXM-80GB",
    "stack": "megatron",
    "precision": "bf16",
}
OPTIONS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn", "cuda_graph_warmup_steps": 0}
STREAM = BATCH * SEQ * HIDDEN * 2
MASK = BATCH * SEQ * SEQ


def _static(layout: dict[str, object], grad_accum: int, options: dict[str, object]) -> dict[str, int]:
    data = {"seq_len": SEQ, "micro_batch": BATCH, "grad_accum": grad_accum}
    job = read_job(JOB | {"layout": layout, "data": data, "engine": {"name": "megatron", "options": options}})
    return {line.what: line.bytes for line in ullage.estimate(job).ledger if "CUDA graphs" in line.what}


@pytest.mark.parametrize("grad_accum", [1, 16])
def test_without_a_pipeline_a_layer_has_one_graph(grad_accum: int) -> None:
    assert _static({"dp": 8}, grad_accum, OPTIONS) == {
        "static inputs of CUDA graphs": 16 * STREAM,
        "static attention masks of CUDA graphs": 16 * MASK,
        "static gradients of CUDA graphs": 2 * STREAM,
    }


@pytest.mark.parametrize("grad_accum", [8, 32])
def test_micro_batches_that_do_not_meet_share(grad_accum: int) -> None:
    """Rank 0 of four has four in flight with 1F1B, each of four layers, however many micro-batches a step has."""
    held = _static({"dp": 2, "pp": 4}, grad_accum, OPTIONS)
    assert held["static inputs of CUDA graphs"] == 4 * 4 * STREAM
    assert held["static gradients of CUDA graphs"] == 2 * STREAM


def test_chunks_share_with_one_another() -> None:
    """Eleven of two layers are in flight, (v - 1) p + 2 (p - 1) + 1: any chunk's input serves any other's."""
    layout = {"dp": 2, "pp": 4, "vpp": 2, "schedule": "interleaved-1f1b"}
    assert _static(layout, 8, OPTIONS)["static inputs of CUDA graphs"] == 11 * 2 * STREAM


def test_no_graphs_no_static_tensors() -> None:
    assert _static({"dp": 8}, 1, {}) == {}


HYBRID = {
    "model_type": "nemotron_h",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 9,
    "hybrid_override_pattern": "M-M*-M-M-",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(("scope", "captured", "masks"), [("attn", 1, 1), ("mamba", 4, 0), (["attn", "mamba"], 5, 1)])
def test_a_hybrid_has_graphs_of_the_layers_in_scope(scope: object, captured: int, masks: int) -> None:
    options = OPTIONS | {"cuda_graph_scope": scope}
    job = read_job(
        JOB
        | {
            "model": HYBRID,
            "layout": {"dp": 8},
            "data": {"seq_len": SEQ, "micro_batch": BATCH},
            "engine": {"name": "megatron", "options": options},
        }
    )
    lines = {line.what: line.bytes for line in ullage.estimate(job).ledger}
    assert lines["static inputs of CUDA graphs"] == captured * STREAM
    assert lines.get("static attention masks of CUDA graphs", 0) == masks * MASK
    assert any(what.startswith("projection, sequence by sequence") for what in lines) != ("mamba" in str(scope))


def _estimated(options: dict[str, object]) -> ullage.Estimate:
    data = {"seq_len": SEQ, "micro_batch": 8 * BATCH}
    engine = {"name": "megatron", "options": options}
    return ullage.estimate(read_job(JOB | {"layout": {"dp": 8}, "data": data, "engine": engine}))


def test_the_steps_before_capture_run_without_graphs() -> None:
    """Three of them by default (training/training.py): they keep what later lies in the graphs' pool; the allocator's cache goes in
    between (cuda_graphs.py, _start_capturing), so that both do not add up."""
    plain, at_once = _estimated({}), _estimated(OPTIONS)
    warmed_up = _estimated(OPTIONS | {"cuda_graph_warmup_steps": 3})
    assert at_once.peak.allocated_bytes < plain.peak.allocated_bytes == warmed_up.peak.allocated_bytes
    assert max(plain.peak.reserved_bytes, at_once.peak.allocated_bytes) <= warmed_up.peak.reserved_bytes
    assert warmed_up.ledger == plain.ledger
