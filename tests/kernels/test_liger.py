"""Liger's kernels in transformers' models, against the closed form of what a layer keeps and the sizes that its sources give."""

from __future__ import annotations

import pytest
from tests.kernels.layers import layer_keeps

import ullage
from ullage.engines.base import context_of
from ullage.errors import Unsupported
from ullage.frozen import replace
from ullage.job.read import read_job
from ullage.kernels.stacks import lower
from ullage.model.build import graph
from ullage.units import GIB

BATCH, SEQ = 2, 512
JOB: dict[str, object] = {
    "schema": 1,
    "model": "llama-3.2-1b",
    "cluster": "1xA100-SXM-80GB",
    "engine": {"name": "single"},
    "data": {"seq_len": SEQ, "micro_batch": BATCH},
    "stack": "liger",
    "precision": "bf16",
    "loss": "fused-linear",
}


def keeps(**keys: object) -> int:
    return layer_keeps(read_job({**JOB, **keys}))


def test_a_layer_keeps_what_its_kernels_need() -> None:
    """u(6 + 2g + 3a) + 4TH and the two numbers a row of its norms; the input is the layer's own. transformers': u(10 + 2g + 4a) + 4TH."""
    tokens, hidden, heads, ratio = BATCH * SEQ, 2048, 32, 8 / 32
    stream = 2 * tokens * hidden
    wide = 8192 / hidden
    expected = stream * (6 + 2 * ratio + 3 * wide) + 4 * tokens * heads + 2 * 4 * tokens
    assert keeps() == pytest.approx(expected, rel=0.001)
    assert keeps(stack="transformers", loss="full") == pytest.approx(
        stream * (10 + 2 * ratio + 4 * wide) + 4 * tokens * heads, rel=0.01
    )


def test_the_loss_leaves_its_gradients_and_no_logits() -> None:
    found = ullage.estimate(read_job({**JOB, "data": {"seq_len": 8192, "micro_batch": 2}, "recompute": "full"}))
    assert not [line for line in found.ledger if line.what.startswith("logits") and line.bytes > GIB]
    whole = ullage.estimate(
        read_job({**JOB, "data": {"seq_len": 8192, "micro_batch": 2}, "recompute": "full", "loss": "full"})
    )
    assert whole.peak.allocated_bytes - found.peak.allocated_bytes > 10 * GIB


def test_a_frozen_head_gets_no_gradient() -> None:
    job = read_job({**JOB, "model": "llama-3.1-8b", "lora": {"rank": 8}})
    found = ullage.estimate(job)
    assert not [line for line in found.ledger if "head" in line.what and line.category == "gradients"]


def test_of_a_norm_that_follows_a_norm_the_gradient_is_a_new_tensor() -> None:
    """transformers/rms_norm.py: in_place=False for gemma2, whose two norms share a gradient; monkey_patch.py: and for EXAONE 4."""
    exaone = {
        "model_type": "exaone4", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 160,
    }  # fmt: skip
    for name, passes in (("llama-3.2-1b", True), ("gemma-2-2b", False), (exaone, False)):
        job = read_job({**JOB, "model": name, "loss": "full"})
        model = graph(job.model)
        block = next(run.block for run in model.runs if run.block.role == "layer")
        norms = [step for step in lower(block, context_of(job, model)) if "norm" in step.name]
        assert norms
        assert all(bool(step.passes) is passes for step in norms)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"model": "qwen3-30b-a3b"}, "stack"),
        ({"model": "gpt2"}, "stack"),
        ({"stack_version": "0.5.2"}, "stack_version"),
        ({"loss": "chunked"}, "loss"),
    ],
)
def test_what_liger_has_not_is_refused(keys: dict[str, object], key: str) -> None:
    with pytest.raises(Unsupported) as raised:
        ullage.estimate(read_job({**JOB, **keys}))
    assert raised.value.key == key


def test_releases_differ_in_what_a_chunk_of_the_loss_works_in() -> None:
    """Up to 0.4 fp32 copies of a chunk's logits; from 0.6.2 a chunk's share of the head's gradient, twice."""
    sizes = {}
    for version in ("4.46", "4.50", "5.0"):
        job = read_job({**JOB, "model": "llama-3.1-8b", "stack_version": version})
        model = graph(job.model)
        *_, step = lower(model.runs[-1].block, replace(context_of(job, model), stack="liger"))
        sizes[version] = sum(one.bytes for one in step.scratch)
    assert sizes["4.50"] < sizes["4.46"] < sizes["5.0"]
    assert sizes["5.0"] > 6 * 128256 * 4096
