"""Qwen3-Next: gated DeltaNet in all layers but each fourth, whose attention gates its output; experts, one of them shared.

Checkpoints have multi-token prediction beside it (mtp.*), which transformers' class leaves out.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import qwen3_moe
from ullage.model.keys import REQUIRED, Keys, Required
from ullage.model.spec import DecoderSpec, Delta, Experts
from ullage.model.standard import standard

_KINDS = ("linear_attention", "full_attention")


def spec(keys: Keys) -> DecoderSpec:
    base = with_delta(keys, joined=True)
    return replace(base, experts=experts(keys, dense_layers=qwen3_moe.without_experts(keys, base.layers)))


def with_delta(keys: Keys, *, joined: bool, kv_heads: int = 2, ffn: int | Required = REQUIRED) -> DecoderSpec:
    """What its kin share: all but the MLP. ffn: the width of a dense one, where config.json has none."""
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, kv_heads=kv_heads, head_dim=256, rope_fraction=0.25, ffn=ffn)
    return replace(
        base,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        gated=True,
        linear_layers=_linear_layers(keys, base.layers),
        delta=_delta(keys, joined=joined),
    )


def experts(keys: Keys, *, count: int = 512, top_k: int = 10, dense_layers: tuple[int, ...] = ()) -> Experts:
    return Experts(
        count=keys.size("num_experts", "num_local_experts", default=count),
        top_k=keys.size("num_experts_per_tok", default=top_k),
        ffn=keys.size("moe_intermediate_size", default=512),
        shared_ffn=keys.size("shared_expert_intermediate_size", default=512),
        shared_gate=True,
        normed=keys.flag("norm_topk_prob", default=True),
        dense_layers=dense_layers,
    )


def _linear_layers(keys: Keys, layers: int) -> tuple[bool, ...]:
    """By layer_types, or else all but each full_attention_interval-th."""
    kinds = keys.per_layer("layer_types", layers)
    if kinds is None:
        interval = keys.size("full_attention_interval", default=4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if any(kind not in _KINDS for kind in kinds):
        raise keys.wrong("layer_types", f"a list of {' | '.join(_KINDS)}")
    return tuple(kind == "linear_attention" for kind in kinds)


def _delta(keys: Keys, *, joined: bool) -> Delta:
    k_heads = keys.size("linear_num_key_heads", default=16)
    v_heads = keys.size("linear_num_value_heads", default=32)
    if v_heads % k_heads:
        raise keys.wrong("linear_num_value_heads", f"a multiple of the {k_heads} key heads of the delta rule")
    return Delta(
        k_heads=k_heads,
        v_heads=v_heads,
        k_dim=keys.size("linear_key_head_dim", default=128),
        v_dim=keys.size("linear_value_head_dim", default=128),
        conv=keys.size("linear_conv_kernel_dim", default=4),
        joined=joined,
    )
