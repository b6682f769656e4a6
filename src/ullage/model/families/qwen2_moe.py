"""Qwen1.5-MoE and Qwen2-MoE: routed experts and a gated shared one."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import qwen2, qwen3_moe
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    base = qwen2.with_windows(keys, standard(keys))
    return replace(
        base,
        qkv_bias=keys.flag("qkv_bias", default=True),
        experts=Experts(
            count=keys.size("num_experts", "num_local_experts", default=60),
            top_k=keys.size("num_experts_per_tok", default=4),
            ffn=keys.size("moe_intermediate_size", default=1408),
            shared_ffn=keys.size("shared_expert_intermediate_size", default=5632),
            shared_gate=True,
            normed=keys.flag("norm_topk_prob", default=False),
            dense_layers=qwen3_moe.without_experts(keys, base.layers),
        ),
    )
