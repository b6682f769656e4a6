"""llm-foundry's models under Composer: its options say which trainer and which loss run (stack transformers is the nearest)."""

from __future__ import annotations

import pytest

import ullage
from ullage.errors import InvalidInput
from ullage.job.read import read_job
from ullage.units import GIB

TOKENS, VOCAB = 8 * 2048, 50368
OPTIONS = {"mixed_precision": "DEFAULT", "loss_fn": "fused_crossentropy", "norm_type": "low_precision_layernorm"}


def _job(**changes: object) -> dict[str, object]:
    model = {
        "model_type": "gpt", "hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072,
        "vocab_size": VOCAB, "max_position_embeddings": 2048, "position": "learned", "norm": "layernorm", "mlp": "gelu",
        "bias": True, "qkv_bias": True, "tie_word_embeddings": True,
    }  # fmt: skip
    job: dict[str, object] = {
        "schema": 1,
        "model": model,
        "cluster": "8xA100-SXM-40GB",
        "data": {"seq_len": 2048, "micro_batch": 8, "grad_accum": 3},
        "layout": {"dp": 8},
        "engine": {"name": "fsdp1", "options": OPTIONS},
        "recompute": "full",
    }
    return {**job, **changes}


def _lines(**changes: object) -> dict[str, int]:
    found = ullage.estimate(read_job(_job(**changes)))
    assert not [warning for warning in found.warnings if "not modelled" in warning]
    return {line.what: line.bytes for line in found.ledger}


def test_the_fused_loss_keeps_the_logits_and_makes_their_gradient() -> None:
    """Two 16-bit tensors of logits and none in fp32: flash-attn reads them as they are."""
    lines = _lines()
    logits = TOKENS * VOCAB * 2
    large = [size for what, size in lines.items() if size >= logits // 2]
    assert large == [logits, logits]


def test_every_micro_batch_is_reduced() -> None:
    assert not [what for what in _lines() if "unsharded gradient" in what]
    accelerates = {"name": "fsdp1", "options": {"loss_fn": "fused_crossentropy"}}
    assert [what for what in _lines(engine=accelerates) if "unsharded gradient" in what]


def test_its_other_loss_is_torchs() -> None:
    engine = {"name": "fsdp1", "options": {**OPTIONS, "loss_fn": "torch_crossentropy"}}
    assert max(_lines(engine=engine).values()) == TOKENS * VOCAB * 4
    assert TOKENS * VOCAB * 4 > GIB


def test_a_loss_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="fused_crossentropy"):
        read_job(_job(engine={"name": "fsdp1", "options": {"loss_fn": "fused_cross_entropy"}}))
