"""OLMo 1: Llama with layer norms that have no parameters."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    return replace(standard(keys), norm="layernorm", norm_affine=False, qkv_bias=bias, out_bias=bias)
