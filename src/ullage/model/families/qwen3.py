"""Qwen3: a norm on each head of q and k, no bias unless attention_bias."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import qwen2
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = qwen2.with_windows(keys, standard(keys, head_dim=128))
    return replace(base, qk_norm="head", qkv_bias=bias, out_bias=bias)
