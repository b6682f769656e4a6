"""Qwen3-VL with experts, the text part: Qwen3's experts, whose weights always sum to one."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import qwen3_moe
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, kv_heads=16)
    return replace(
        base,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        experts=Experts(
            count=keys.size("num_experts", "num_local_experts", default=60),
            top_k=keys.size("num_experts_per_tok", default=4),
            ffn=keys.size("moe_intermediate_size", default=1408),
            dense_layers=qwen3_moe.without_experts(keys, base.layers),
        ),
    )
