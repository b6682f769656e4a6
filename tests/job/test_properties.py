"""read(write(job)) = job for any job that can exist, and no text makes the reader fail other than by its own errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ullage.errors import UllageError
from ullage.job.engine import ENGINES, SCHEDULES, STACKS
from ullage.job.job import Job
from ullage.job.optimizer import SPELLINGS
from ullage.job.precision import SHORT_NAMES
from ullage.job.read import ATTENTION, read_job
from ullage.job.recipe import LOSSES
from ullage.job.write import job_to_dict
from ullage.job.yaml_tree import parse_yaml

MODEL = {
    "model_type": "gpt",
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "intermediate_size": 4096,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "position": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "qkv_bias": False,
    "tie_word_embeddings": False,
}
DEGREE = st.sampled_from([1, 2, 4])


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, object]:
    """Jobs in job.md's shape; most exist, some contradict themselves."""
    tp, cp, pp, dp = draw(DEGREE), draw(DEGREE), draw(DEGREE), draw(DEGREE)
    world = tp * cp * pp * dp
    keys = {
        "model": st.just(MODEL),
        "data": st.fixed_dictionaries(
            {"grad_accum": st.sampled_from([1, 4, 8])},
            optional={"micro_batch": st.integers(1, 4), "padding_mask": st.booleans(), "seq_len": st.just(2048)},
        ),
        "layout": st.fixed_dictionaries(
            {"tp": st.just(tp), "cp": st.just(cp), "pp": st.just(pp)},
            optional={"schedule": st.sampled_from(SCHEDULES), "vpp": st.sampled_from([1, 2])},
        ),
        "engine": st.fixed_dictionaries({"name": st.sampled_from(ENGINES)}),
        "stack_version": st.sampled_from([None, "4.36", "2024-12-18"]),
        "precision": st.sampled_from(SHORT_NAMES)
        | st.fixed_dictionaries({}, optional={"params": st.sampled_from(["fp32", "bf16"]), "master": st.none()}),
        "optimizer": st.sampled_from(SPELLINGS),
        "recompute": st.sampled_from(
            ["none", "full", {"every": 2}, {"layers": 3}, {"sqrt": True}, {"modules": ["mlp"]}]
        ),
        "attention": st.sampled_from(ATTENTION),
        "loss": st.sampled_from(LOSSES),
        "lora": st.sampled_from([None, {"rank": 4}, {"targets": "all-linear", "base": "nf4"}]),
        "freeze": st.sampled_from([[], ["*norm*"]]),
        "compile": st.booleans(),
    }
    job = {key: draw(value) for key, value in keys.items() if key == "model" or draw(st.booleans())}
    job["cluster"] = f"{world}xH100-SXM-80GB" if "layout" in job else "8xH100-SXM-80GB"
    if job.get("engine") and draw(st.booleans()):
        job["stack"] = draw(st.sampled_from(STACKS))
    return job


def read_or_none(job: dict[str, object]) -> Job | None:
    try:
        return read_job(job)
    except UllageError as error:
        refused = str(error)
    assert "\n" not in refused
    return None


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_what_is_written_reads_the_same(written: dict[str, object]):
    job = read_or_none(written)
    if job is not None:
        again = read_job(json.loads(json.dumps(job_to_dict(job))))
        assert replace(again, defaults=()) == replace(job, defaults=())
        assert all(line.startswith("model.") for line in again.defaults)


@given(jobs(), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_the_order_of_keys_says_nothing(written: dict[str, object], random):
    shuffled = list(written.items())
    random.shuffle(shuffled)
    assert read_or_none(dict(shuffled)) == read_or_none(written)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([
    "schema", "data", "layout", "engine", "stack", "stack_version", "precision", "optimizer", "grad_clip", "recompute",
    "attention", "loss", "offload", "lora", "freeze", "compile",
])  # fmt: skip


@given(KEYS, VALUES)
@settings(max_examples=300)
def test_any_value_of_any_key_is_read_or_refused(key: str, value: object):
    job = read_or_none({"model": MODEL, "cluster": "8xH100-SXM-80GB", key: value})
    if job is not None:
        assert replace(read_job(job_to_dict(job)), defaults=()) == replace(job, defaults=())


@given(st.text(max_size=60))
@settings(max_examples=300)
def test_any_text_is_yaml_or_refused(text: str):
    refused = "job.yaml"
    try:
        parse_yaml(text, "job.yaml")
    except UllageError as error:
        refused = str(error)
    assert "job.yaml" in refused


@given(st.binary(max_size=60), st.sampled_from([".yaml", ".json", ".toml", ""]))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused_in_one_line(tmp_path: Path, content: bytes, suffix: str):
    path = tmp_path / f"job{suffix}"
    path.write_bytes(content)
    with pytest.raises(UllageError, match=path.name):
        read_job(path)
