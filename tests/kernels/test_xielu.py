"""xIELU's Python code, and the kernel that stands in its place where the xielu package is installed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.kernels.layers import layer_keeps

import ullage
from ullage.errors import Contradiction, InvalidInput, Unsupported
from ullage.job.read import read_job

WIDE = {"params": "bf16", "compute": "bf16", "grads": "bf16", "master": None, "reduce": "bf16", "autocast": True}
TOKENS, HIDDEN, FFN, LAYERS = 2 * 256, 256, 2048, 4
APERTUS = {
    "model_type": "apertus", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "vocab_size": 1024, "hidden_act": "xielu",
}  # fmt: skip
SMALL = 4096
"""Bytes of the parameters and what is made of them, each in an allocation of its own."""


def _job(**keys: Any) -> Any:
    base = {"schema": 1, "model": APERTUS, "cluster": "1xH100-SXM-80GB", "engine": {"name": "single"}, "precision": WIDE,
            "optimizer": "adamw", "data": {"seq_len": 256, "micro_batch": 2}}  # fmt: skip
    return read_job({**base, **keys})


def _kernel() -> dict[str, object]:
    return {"name": "single", "options": {"xielu_cuda": True}}


@pytest.mark.parametrize(
    ("precision", "more"),
    [
        # autocast: of an element p x, expm1 and what is subtracted from it in fp32, and where x is positive
        (WIDE, 4 + 4 + 4 + 1),
        ("bf16", 2 + 2 + 2 + 1),
    ],
)
def test_the_python_code_keeps_what_its_products_read(precision: object, more: int) -> None:
    """activations.py, _xielu_python, by derivatives.yaml: mul keeps both factors, expm1 its result, where its condition; min keeps x,
    which the kernel keeps too. Autocast runs expm1 and softplus in fp32 (autocast_mode.h, AT_FORALL_FP32)."""
    python = layer_keeps(_job(precision=precision))
    kernel = layer_keeps(_job(precision=precision, engine=_kernel()))
    assert python - kernel == pytest.approx(more * TOKENS * FFN, abs=SMALL)


@pytest.mark.parametrize(("engine", "width"), [({"name": "single"}, 4), (_kernel(), 2)])
def test_the_stream_turns_to_fp32_behind_a_four_bit_linear(engine: dict[str, object], width: int) -> None:
    """Linear4bit gives back fp32 where it is given fp32 (bitsandbytes nn/modules.py): the first layer's sum and all behind it."""
    found = ullage.estimate(_job(engine=engine, lora={"rank": 8, "base": "nf4"}, recompute="full"))
    kept = sum(line.bytes for line in found.ledger if line.what == "residual stream between blocks")
    given = 2 + (LAYERS - 1) * width  # by the embedding and each layer but the last, whose output the head has read
    assert kept == pytest.approx(TOKENS * HIDDEN * given, abs=SMALL)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(Unsupported, match="xielu"):
        ullage.estimate(_job(stack="torchtitan", engine={"name": "fsdp2"}, precision="bf16-mixed"))
    with pytest.raises(InvalidInput, match=r"hidden_act"):
        _job(model={**APERTUS, "model_type": "llama"})


def test_the_kernel_is_of_this_activation_alone() -> None:
    with pytest.raises((Contradiction, InvalidInput), match="xielu_cuda"):
        _job(model={**APERTUS, "model_type": "llama", "hidden_act": "silu"}, engine=_kernel())
