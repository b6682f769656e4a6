"""Adapters beside a frozen model: the closed form against PEFT's own code, one whole step of it."""

from __future__ import annotations

from itertools import product

import pytest

from ullage.engines.estimate import estimate
from ullage.job.read import read_job
from ullage.memory.ledger import by_category
from ullage.trace.whole import traced

pytest.importorskip("peft")

SHAPE = {"num_hidden_layers": 4, "vocab_size": 1024, "max_position_embeddings": 2048}
WIDTH = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS = {
    "llama": ({"model_type": "llama", **WIDTH, **SHAPE}, "q_proj", "v_proj"),
    "qwen2": ({"model_type": "qwen2", **WIDTH, **SHAPE}, "q_proj", "v_proj"),
    "phi3": ({"model_type": "phi3", "pad_token_id": 0, **WIDTH, **SHAPE}, "qkv_proj"),
}
MODES = list(product(("bf16", "bf16-mixed"), ("none", "full"), (0.0, 0.1), (None, "bf16")))


def _compared(keys: dict[str, object]) -> tuple[int, int]:
    job = read_job(
        {
            "schema": 1,
            "cluster": "1xA100-SXM-80GB",
            "engine": {"name": "single"},
            "data": {"seq_len": 256, "micro_batch": 2, "grad_accum": 2},
            "optimizer": {"name": "adamw", "impl": "foreach"},
            **keys,
        }
    )
    answer = estimate(job)
    closed = answer.peak.allocated_bytes - by_category(answer.ledger).get("workspace", 0)
    return closed, traced(job).steady.bytes


@pytest.mark.parametrize("every", [False, True], ids=["some", "all-linear"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("number", range(4))
def test_a_step_is_peft_s(model: str, every: bool, number: int) -> None:
    """Each model in four of the sixteen modes."""
    config, *targets = MODELS[model]
    precision, recompute, dropout, dtype = MODES[(5 * number + 3 * list(MODELS).index(model) + every) % len(MODES)]
    lora = {"rank": 16, "targets": "all-linear" if every else targets, "dropout": dropout, "dtype": dtype}
    closed, real = _compared({"model": config, "precision": precision, "recompute": recompute, "lora": lora})
    assert closed == pytest.approx(real, rel=0.005)


def test_ddp_reduces_adapters_alone() -> None:
    config, *targets = MODELS["llama"]
    engine = {"name": "ddp"}
    lora = {"rank": 16, "targets": targets}
    closed, real = _compared(
        {"model": config, "precision": "bf16", "lora": lora, "engine": engine, "cluster": "2xA100-SXM-80GB"}
    )
    assert closed == pytest.approx(real, rel=0.005)
