"""Any job that can be written is answered or refused by name; nothing else happens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.jobs import ENGINES, EXPERTS, MODEL

from ullage.api import estimate, read_job
from ullage.errors import UllageError

CHOICES: dict[str, list[object]] = {
    "model": [MODEL, EXPERTS, "gpt2", "deepseek-v2-lite", "phi-3-mini", "gemma-2-2b", "pythia-160m"],
    "stack": ["transformers", "torchtitan", "torchtune", "megatron"],
    "precision": ["fp32", "bf16", "bf16-mixed", "fp16-mixed", "fp8-mixed"],
    "recompute": ["none", "full", "selective", {"every": 2}, {"layers": 1}, {"sqrt": True}, {"modules": ["mlp"]}],
    "attention": ["flash", "mem-efficient", "math", "eager"],
    "loss": ["full", "chunked", {"kind": "fused-linear", "chunks": 4}, "vocab-parallel", "vocab-parallel-fused"],
    "optimizer": ["adamw", "sgd", {"name": "adamw", "impl": "foreach"}, {"name": "adamw", "impl": "for-loop"}],
    "compile": [False, True],
    "grad_clip": [True, False],
}


@st.composite
def written(draw: st.DrawFn) -> dict[str, object]:
    job: dict[str, object] = {key: draw(st.sampled_from(values)) for key, values in CHOICES.items()}
    engine = draw(st.sampled_from(ENGINES))
    job["engine"] = dict(engine)
    if engine["name"] == "megatron" and draw(st.booleans()):
        job["stack"] = "megatron"  # the one that it mostly runs
    splits = engine["name"] in ("megatron", "fsdp2", "deepspeed")
    degree = st.sampled_from([1, 1, 2]) if splits else st.just(1)
    layout = {name: draw(degree) for name in ("tp", "pp", "cp", "ep")}
    layout["sp"] = layout["tp"] > 1 and draw(st.booleans())
    job["layout"] = layout
    job["cluster"] = "1xH100-SXM-80GB" if engine["name"] == "single" else "8xH100-SXM-80GB"
    job["data"] = {
        "seq_len": draw(st.sampled_from([128, 512])),
        "micro_batch": draw(st.integers(1, 2)),
        "grad_accum": draw(st.integers(1, 4)),
        "padding_mask": draw(st.booleans()),
    }
    return job


@settings(max_examples=150, deadline=None)
@given(written())
def test_an_estimate_answers_or_refuses_by_name(job: dict[str, object]) -> None:
    try:
        found = estimate(read_job(job))
    except UllageError:
        return
    assert sum(line.bytes for line in found.ledger) == found.peak.allocated_bytes
