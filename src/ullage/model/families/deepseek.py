"""DeepSeekMoE (v1): plain attention, routed and shared experts, leading dense layers."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import dense_layers, standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys)
    return replace(base, qkv_bias=bias, out_bias=bias, experts=experts(keys, base.layers))


def experts(
    keys: Keys, layers: int, *, routed: int | None = None, dense: int = 0, normed: bool = False
) -> Experts | None:
    """Routed and shared experts in DeepSeek's keys; None where the model is dense. The defaults are the family's."""
    count = keys.optional("n_routed_experts", "num_experts") if keys.has("n_routed_experts") else routed
    first = keys.count("first_k_dense_replace", default=dense)
    every = keys.size("moe_layer_freq", default=1)
    ffn = keys.optional("moe_intermediate_size")
    shared = keys.count("n_shared_experts", default=0)
    if count is None:
        return None
    ffn = ffn or keys.size("moe_intermediate_size")
    return Experts(
        count=count,
        top_k=keys.size("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=shared * ffn,
        normed=keys.flag("norm_topk_prob", default=normed),
        dense_layers=dense_layers(layers, lambda index: index >= first and index % every == 0),
    )
