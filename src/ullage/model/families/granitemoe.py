"""Granite with experts: every MLP a mixture, whose router picks before it takes the softmax; multipliers change no size."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys)
    experts = Experts(
        count=keys.size("num_local_experts", "num_experts", default=8),
        top_k=keys.size("num_experts_per_tok", default=2),
        ffn=base.ffn,
    )
    return replace(base, qkv_bias=bias, out_bias=bias, experts=experts)
