"""gpt-oss: experts, router and attention all with bias, learned sinks, every second layer with a window."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=True)
    base = standard(keys, kv_heads=8, head_dim=64)
    return replace(
        base,
        qkv_bias=bias,
        out_bias=bias,
        attention_sinks=True,
        rope_scaled=True,  # YaRN by 32
        mlp_form="clamped_silu",  # (up + 1) * gate * sigmoid(1.702 gate), both clamped
        windows=windows(keys, base.layers, sliding_window(keys, 128), lambda index: index % 2 == 0),
        experts=Experts(
            count=keys.size("num_local_experts", "num_experts", default=128),
            top_k=keys.size("num_experts_per_tok", "experts_per_token", default=4),
            ffn=base.ffn,
            router_bias=True,
            expert_bias=True,
        ),
    )
