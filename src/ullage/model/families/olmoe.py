"""OLMoE: every MLP a mixture of experts, q and k normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys)
    experts = Experts(
        count=keys.size("num_experts", "num_local_experts", default=64),
        top_k=keys.size("num_experts_per_tok", default=8),
        ffn=base.ffn,
        normed=keys.flag("norm_topk_prob", default=False),
    )
    return replace(base, qk_norm="all", qkv_bias=bias, out_bias=bias, experts=experts)
