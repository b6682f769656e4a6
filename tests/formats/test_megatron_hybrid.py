"""Hybrids in Megatron-LM's arguments, read and told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ullage.formats import megatron
from ullage.formats.complete import document_of
from ullage.formats.convert import write_job
from ullage.formats.registry import format_named
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job

# NVIDIA/Megatron-LM@d98e8a6 tests/functional_tests/test_cases/hybrid/hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G: what sizes its model
FUNCTIONAL_TEST = """\
MODEL_ARGS:
  --hidden-size: 1024
  --num-attention-heads: 16
  --group-query-attention: true
  --num-query-groups: 8
  --hybrid-layer-pattern: M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-
  --spec: "[megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec]"
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --vocab-file: vocab.json
  --max-position-embeddings: 1024
  --bf16: true
"""
HYBRID = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_hidden_layers": 6,
    "hybrid_override_pattern": "MEM*-E",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "max_position_embeddings": 8192,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_latent_size": 1024,
    "num_nextn_predict_layers": 2,
}


def job_of(text: str) -> Job:
    reading = megatron.read(text, "args")
    document, _ = document_of(replace(reading, keys={**reading.keys, "cluster": "8xH100-SXM-80GB"}))
    return read_job(document)


def test_a_functional_tests_arguments() -> None:
    """The parameters and states that its log shows, 2.81 GiB, are those of this many elements (bf16, fp32 gradients, the rest over 8)."""
    model = graph_of(job_of(FUNCTIONAL_TEST))
    layers = [run.block.name for run in model.runs for _ in range(run.repeat) if run.block.role == "layer"]
    assert (layers.count("layer-mamba"), layers.count("layer-mlp"), layers.count("layer-attention")) == (20, 20, 4)
    assert model.parameter_count() * (2 + 4 + 12 / 8) / 2**30 == pytest.approx(2.808, rel=1e-3)


@pytest.mark.parametrize("changes", [{}, {"hybrid_override_pattern": "M*-M*-", "num_nextn_predict_layers": 0}])
@pytest.mark.parametrize("options", [{}, {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute"}])
def test_a_hybrid_told_and_read_is_the_same(changes: dict[str, object], options: dict[str, object]) -> None:
    said = {"normalization": "RMSNorm", "position_embedding_type": "none", **options}
    job = read_job(
        {
            "schema": 1,
            "model": HYBRID | changes,
            "cluster": "8xH100-SXM-80GB",
            "engine": {"name": "megatron", "options": said},
            "data": {"seq_len": 4096},
        }
    )
    told = write_job(job, format_named("megatron")).text
    again = job_of(told)
    assert graph_of(again).runs == graph_of(job).runs
    assert graph_of(again).sizes == graph_of(job).sizes


def test_a_legacy_pattern_of_predictions() -> None:
    legacy = FUNCTIONAL_TEST + "  --mtp-hybrid-override-pattern: '*E'\n  --mtp-num-layers: 1\n  --num-experts: 8\n"
    assert job_of(legacy).model.keys["num_nextn_predict_layers"] == 1
    unified = FUNCTIONAL_TEST.replace("M-M-M-M-\n", "M-M-M-|M-/*E/*E\n")
    keys = job_of(unified).model.keys
    assert (keys["num_hidden_layers"], keys["num_nextn_predict_layers"]) == (44, 2)


def test_a_pattern_that_is_cut_says_the_stages() -> None:
    cut = FUNCTIONAL_TEST.replace("M-M-M-M*-M-M-M-M*-M-M", "M-M-M-M*-|M-M-M-M*-|M-M").replace(
        "M-M-M-M-\n", "|M-M-M-M-\n"
    )
    layout = job_of(cut + "  --pipeline-model-parallel-size: 2\n").layout
    assert (layout.pp, layout.vpp, layout.schedule, layout.pp_split) == (2, 2, "interleaved-1f1b", (9, 9, 18, 8))
