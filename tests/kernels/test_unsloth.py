"""Unsloth's fast functions, against the closed form of what a layer keeps and its table of the longest sequences that fit."""

from __future__ import annotations

import pytest
from tests.kernels.layers import layer_keeps

import ullage
from ullage.errors import Unsupported
from ullage.job.read import read_job
from ullage.kernels.unsloth_loss import chunks
from ullage.units import GIB

TOKENS = 1024
EVERY = {"rank": 16, "targets": "all-linear", "base": "nf4"}
JOB: dict[str, object] = {
    "schema": 1,
    "model": "llama-3.1-8b",
    "cluster": "1xA100-SXM-80GB",
    "engine": {"name": "single"},
    "data": {"seq_len": TOKENS, "micro_batch": 1},
    "stack": "unsloth",
    "precision": "bf16",
    "lora": EVERY,
}


def keeps(**keys: object) -> int:
    return layer_keeps(read_job({**JOB, **keys}))


def test_a_layer_keeps_what_its_functions_need() -> None:
    """u(6 + 2g + 2a) + 4TH and the numbers of its norms' rows: no silu, no product, and of a 4-bit weight nothing."""
    hidden, heads, groups, ratio = 4096, 32, 8 / 32, 14336 / 4096
    stream = 2 * TOKENS * hidden
    expected = stream * (6 + 2 * groups + 2 * ratio) + 4 * TOKENS * heads + 2 * 4 * TOKENS
    assert keeps() == pytest.approx(expected, rel=0.001)


def test_norms_of_queries_and_keys_keep_the_projections() -> None:
    """unsloth models/qwen3.py, Qwen3Attention_fast_forward: one call makes q, k and v, then the norms read q and k, with a number for each
    head of each token."""
    hidden, heads, kv_heads, ratio = 4096, 32, 8, 12288 / 4096
    groups = kv_heads / heads
    stream = 2 * TOKENS * hidden
    expected = stream * (6 + 2 * groups + 2 * ratio) + 4 * TOKENS * heads + 2 * 4 * TOKENS
    expected += stream * (1 + groups) + 4 * TOKENS * (heads + kv_heads)
    assert keeps(model="qwen3-8b") == pytest.approx(expected, rel=0.001)


def test_dropout_falls_back_to_peft() -> None:
    """models/llama.py, patch_peft_model: fast functions know no dropout."""
    assert keeps(lora={**EVERY, "dropout": 0.1}) > 1.5 * keeps()


@pytest.mark.parametrize(
    ("model", "memory_gib", "longest"),
    [
        ("llama-3.1-8b", 8, 2972),
        ("llama-3.1-8b", 12, 21848),
        ("llama-3.1-8b", 40, 153977),
        ("llama-3.1-8b", 80, 342733),
        ("llama-3.3-70b", 48, 12106),
        ("llama-3.3-70b", 80, 89389),
    ],
)
def test_the_longest_sequences_of_its_table_fit(model: str, memory_gib: int, longest: int) -> None:
    """github.com/unslothai/unsloth, README, "Context length benchmarks": QLoRA of rank 32, batches of one. Twice as long, none."""
    job = {
        **JOB,
        "model": model,
        "cluster": {
            "device": {"memory": f"{memory_gib}GiB", "bf16_flops_per_s": 312e12, "memory_bytes_per_s": 2.039e12}
        },
        "lora": {**EVERY, "rank": 32, "base": "nf4-double"},
        "recompute": "full",
        "loss": "fused-linear",
        "offload": {"activations": "cpu"},
        "optimizer": "adamw-8bit",
    }
    verdicts = [
        ullage.estimate(read_job({**job, "data": {"seq_len": length, "micro_batch": 1}})).verdict
        for length in (longest, 2 * longest + 4096)
    ]
    assert verdicts[0] in ("fits", "tight")
    assert verdicts[1] in ("oom", "tight")


def test_chunks_of_the_loss_follow_the_free_memory() -> None:
    """_get_chunk_multiplier and get_chunk_size: half of what is free, at most 4 GiB of fp32 logits, else a multiple of four."""
    assert chunks(8000, 128256, 80 * GIB) == 1
    assert chunks(8192 * 2, 128256, 80 * GIB) == 4
    assert chunks(8192, 128256, 2 * GIB) == 4
    assert chunks(65536, 128256, 80 * GIB) == 8


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"model": "phi-2"}, "stack"),
        ({"lora": None}, "stack"),
        ({"loss": "chunked"}, "loss"),
        ({"recompute": "selective"}, "recompute"),
    ],
)
def test_what_unsloth_has_not_is_refused(keys: dict[str, object], key: str) -> None:
    with pytest.raises(Unsupported) as raised:
        ullage.estimate(read_job({**JOB, **keys}))
    assert raised.value.key == key
