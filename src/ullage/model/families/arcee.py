"""Arcee's AFM: Llama with a plain MLP of squared relu."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, activation="relu2")
    return replace(base, glu=False, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias", default=False))
