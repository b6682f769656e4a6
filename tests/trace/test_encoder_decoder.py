"""A whole step of T5 is the trace of transformers' own, to the byte, at target lengths of its own and under either attention."""

from __future__ import annotations

import pytest

from ullage.engines.estimate import estimate
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.trace.models import factory_of
from ullage.trace.run import trace

SMALL = {
    "model_type": "t5",
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 688,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 8,
    "vocab_size": 2000,
}
OWN_HEAD = {**SMALL, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("model", "seq", "target", "batch", "precision", "attention", "recompute"),
    [
        (OWN_HEAD, 64, 256, 2, "bf16", "flash", "none"),
        (SMALL, 64, 256, 2, "bf16-mixed", "flash", "full"),
        (OWN_HEAD, 256, 48, 1, "bf16-mixed", "flash", "full"),
        (OWN_HEAD, 256, 64, 2, "bf16-mixed", "eager", "none"),
        (SMALL, 256, 64, 2, "bf16", "eager", "full"),
        ({**SMALL, "dropout_rate": 0.0}, 128, 128, 2, "fp32", "eager", "selective"),
    ],
)
def test_a_step_is_the_trace(
    model: dict[str, object], seq: int, target: int, batch: int, precision: str, attention: str, recompute: str
) -> None:
    """SGD, whose step leaves nothing that a GPU's run has not. The terms' gradients, the encoder's output and the zeros that stand for
    positions beside it under recomputation are in each of these peaks."""
    job = read_job(
        {
            "schema": 1,
            "model": model,
            "cluster": "1xH100-SXM-80GB",
            "stack": "transformers",
            "engine": {"name": "single", "options": {"max_target_length": target}},
            "optimizer": {"name": "sgd", "impl": "foreach"},
            "data": {"seq_len": seq, "micro_batch": batch},
            "precision": precision,
            "attention": attention,
            "recompute": recompute,
        }
    )
    told = estimate(job)
    found = trace(factory_of(job), rank=0, world=1)
    assert told.peak.allocated_bytes - by_category(told.ledger).get("workspace", 0) == found.steady.bytes
