"""A loss that makes no logits, against the memory that its paper measured."""

from __future__ import annotations

import pytest

import ullage
from ullage.engines.base import context_of
from ullage.errors import Unsupported
from ullage.job.read import read_job
from ullage.kernels.stacks import lower
from ullage.model.build import graph
from ullage.units import MIB

JOB: dict[str, object] = {
    "schema": 1,
    "cluster": "1xH100-SXM-80GB",
    "engine": {"name": "single"},
    "data": {"seq_len": 8192, "micro_batch": 1},
    "precision": "bf16",
    "loss": "fused-linear",
}
GEMMA = {
    "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216, "tie_word_embeddings": False,
}  # fmt: skip


def test_it_takes_its_gradients_and_little_else() -> None:
    """arXiv:2411.09009, table 1: 8192 tokens of Gemma 2 2B take 1164 MiB, of which 1161 are the two gradients; whole logits take 28000."""
    job = read_job({**JOB, "model": GEMMA})
    model = graph(job.model)
    context = context_of(job, model)
    *_, step = lower(model.runs[-1].block, context)
    kept = sum(one.bytes for one in (*step.writes[1:], *step.backward_scratch))
    gradients = 2 * (8192 * 2304 + sum(one.numel for one in step.weights))
    assert (kept + gradients) / MIB == pytest.approx(1163.98, rel=0.002)


def test_a_frozen_head_has_no_gradient() -> None:
    found = ullage.estimate(read_job({**JOB, "model": GEMMA, "recompute": "full", "lora": {"rank": 8}}))
    assert not [line for line in found.ledger if "logits" in line.what and line.bytes > MIB]
    assert not [line for line in found.ledger if "gradient of lm_head" in line.what]


def test_tensor_parallelism_is_refused() -> None:
    layout = {"layout": {"tp": 2, "dp": 1}, "cluster": "2xH100-SXM-80GB", "engine": {"name": "fsdp2"}}
    with pytest.raises(Unsupported) as raised:
        ullage.estimate(read_job({**JOB, **layout, "model": "llama-3.2-1b"}))
    assert raised.value.key == "loss"
