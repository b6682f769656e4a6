"""EXAONE 3 and 3.5: Llama, which transformers' class is, with other names for layers and activation."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, activation_key="activation_function", layers_key="num_layers", kv_heads=8, vocab=102400)
    return replace(base, qkv_bias=bias, out_bias=bias, mlp_bias=keys.flag("mlp_bias", default=False))
