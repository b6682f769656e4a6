"""Qwen3-VL, the text part: Qwen3 without windows, turned by positions in time, height and width."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    return replace(standard(keys, kv_heads=32, head_dim=128), qk_norm="head", qkv_bias=bias, out_bias=bias)
