"""GLM-4 in transformers' own format: bias on q, k and v, half of each head rotates, gate and up in one projection."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    return replace(
        standard(keys, kv_heads=2, head_dim=128, rope_fraction=0.5),
        qkv_bias=keys.flag("attention_bias", default=True),
        fused_gate_up=True,
    )
