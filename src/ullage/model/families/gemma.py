"""Gemma 1: geglu, tied embeddings, heads of 256."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, activation="gelu_pytorch_tanh", activation_key="hidden_activation", head_dim=256, tied=True)
    return replace(base, qkv_bias=bias, out_bias=bias)
