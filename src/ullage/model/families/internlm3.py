"""InternLM 3: Llama, which transformers' class is; qkv_bias and bias are its attention_bias and mlp_bias, and must be one."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("qkv_bias", "attention_bias", default=False)
    if keys.flag("bias", "mlp_bias", default=False) != bias:
        raise keys.wrong("qkv_bias", "the same as bias: the class has one for all of attention")
    return replace(standard(keys, kv_heads=2, head_dim=128), qkv_bias=bias, out_bias=bias, mlp_bias=bias)
