"""DeepSeek-V2 and V2-Lite: latent attention, routed and shared experts, leading dense layers."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import deepseek
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Latent
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    base = with_latent(keys, standard(keys, head_dim=64))
    return replace(base, experts=deepseek.experts(keys, base.layers, routed=64))


def with_latent(keys: Keys, base: DecoderSpec, *, q_rank: int = 1536) -> DecoderSpec:
    """Latent attention; q_lora_rank: null means that q is projected in one step."""
    bias = keys.flag("attention_bias", default=False)
    latent = Latent(
        q_rank=keys.optional("q_lora_rank") if keys.has("q_lora_rank") else q_rank,
        kv_rank=keys.size("kv_lora_rank", default=512),
        qk_nope_dim=keys.size("qk_nope_head_dim", default=128),
        qk_rope_dim=keys.size("qk_rope_head_dim", default=64),
        v_dim=keys.size("v_head_dim", default=128),
        down_bias=bias,
    )
    return replace(base, latent=latent, out_bias=bias, kv_heads=base.heads)
