"""Seed-OSS: Llama with bias on q, k and v, and dropout after each branch."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard

_DROPOUT = 0.1


def spec(keys: Keys) -> DecoderSpec:
    return replace(
        standard(keys, kv_heads=8, head_dim=128),
        qkv_bias=keys.flag("attention_bias", default=True),
        out_bias=keys.flag("attention_out_bias", default=False),
        mlp_bias=keys.flag("mlp_bias", default=False),
        attention_dropout=keys.rate("attention_dropout", default=_DROPOUT),
        hidden_dropout=keys.rate("residual_dropout", default=_DROPOUT),
        embedding_dropout=0.0,
    )
