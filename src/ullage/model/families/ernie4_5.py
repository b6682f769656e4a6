"""ERNIE 4.5, the dense ones: Llama with one flag for every bias and a tied head."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("use_bias", default=False)
    base = standard(keys, kv_heads=2, head_dim=128, tied=True)
    return replace(base, qkv_bias=bias, out_bias=bias, mlp_bias=bias, attention_dropout=0.0)
