"""A model of which a part is frozen: the closed form against transformers' own code, one whole step of it."""

from __future__ import annotations

import pytest

from ullage.engines.estimate import estimate
from ullage.errors import InvalidInput, Unsupported
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.trace.whole import traced

SHAPE = {
    "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": 4, "vocab_size": 1024, "max_position_embeddings": 2048,
}  # fmt: skip
BASE: dict[str, object] = {
    "schema": 1,
    "cluster": "1xA100-SXM-80GB",
    "engine": {"name": "single"},
    "data": {"seq_len": 256, "micro_batch": 2, "grad_accum": 2},
    "optimizer": {"name": "adamw", "impl": "foreach"},
    "precision": "bf16",
    "model": {"model_type": "llama", **SHAPE},
}
DDP = {"engine": {"name": "ddp"}, "cluster": "2xA100-SXM-80GB"}
FSDP2 = {"engine": {"name": "fsdp2"}, "cluster": "4xA100-SXM-80GB"}
ZERO_2 = {**FSDP2, "engine": {"name": "fsdp2", "zero_stage": 2}}


@pytest.mark.parametrize(
    ("freeze", "keys"),
    [
        (["*embed_tokens*", "model.layers.[01].*"], {}),
        (["*proj*", "*embed_tokens*"], {"model": {"model_type": "llama", **SHAPE, "tie_word_embeddings": True}}),
        (["*self_attn*"], {"model": {"model_type": "qwen3", **SHAPE}, "precision": "bf16-mixed", "recompute": "full"}),
        (["*lora_A*"], {"lora": {"rank": 16, "targets": ["q_proj", "v_proj"]}}),
        (["*embed*", "*.mlp.*"], {"recompute": "full", **DDP}),
        (["*embed_tokens*", "model.layers.[01].*"], {"recompute": "full"}),
        (["*embed_tokens*", "model.layers.[01].*"], FSDP2),
        (["*embed*", "*.mlp.*"], {"recompute": "full", **FSDP2}),
        (["*self_attn*"], {"precision": "bf16-mixed", **ZERO_2}),
        (["*lora_A*"], {"lora": {"rank": 16, "targets": ["q_proj", "v_proj"]}, **FSDP2}),
    ],
    ids=[
        "first layers",
        "norms alone",
        "attention",
        "half an adapter",
        "ddp",
        "first layers, run again",
        "fsdp2, first layers",
        "fsdp2, MLPs",
        "fsdp2, kept gathered",
        "fsdp2, half an adapter",
    ],
)
def test_a_step_is_transformers_s(freeze: list[str], keys: dict[str, object]) -> None:
    job = read_job({**BASE, **keys, "freeze": freeze})
    answer = estimate(job)
    closed = answer.peak.allocated_bytes - by_category(answer.ledger).get("workspace", 0)
    assert closed == pytest.approx(traced(job).steady.bytes, rel=0.005)


def test_what_is_trained_is_counted() -> None:
    """PEFT's LN tuning of Llama-3.2-3B trains the weights of 57 norms: 175,104 parameters (method_comparison/MetaMathQA)."""
    found = estimate(read_job({**BASE, "model": "llama-3.2-3b", "freeze": ["*proj*", "*embed_tokens*"]}))
    assert found.trainable_parameters == 175_104


def test_a_pattern_that_names_nothing_or_all_is_said() -> None:
    with pytest.raises(InvalidInput, match="nothing to train"):
        estimate(read_job({**BASE, "freeze": ["*"]}))
    with pytest.raises(InvalidInput, match=r"transformer\.h"):
        estimate(read_job({**BASE, "freeze": ["transformer.h.*"]}))
    with pytest.raises(Unsupported, match="gpt2"):
        estimate(read_job({**BASE, "model": "gpt2", "freeze": ["*"]}))
