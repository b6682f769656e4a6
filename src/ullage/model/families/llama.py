"""Llama 1 to 3, and the many that are written as llama (Yi, DeepSeek LLM, SmolLM2, TinyLlama, CodeLlama)."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    return replace(standard(keys), qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias", default=False))
