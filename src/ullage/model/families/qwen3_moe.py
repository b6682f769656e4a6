"""Qwen3 with experts: dense where mlp_only_layers says so or decoder_sparse_step skips."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import dense_layers, sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, kv_heads=4)
    window = sliding_window(keys, 4096)
    if not keys.flag("use_sliding_window", default=False):
        window = None
    return replace(
        base,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        windows=windows(keys, base.layers, window),
        experts=Experts(
            count=keys.size("num_experts", "num_local_experts", default=128),
            top_k=keys.size("num_experts_per_tok", default=8),
            ffn=keys.size("moe_intermediate_size", default=768),
            normed=keys.flag("norm_topk_prob", default=False),
            dense_layers=without_experts(keys, base.layers),
        ),
    )


def without_experts(keys: Keys, layers: int) -> tuple[int, ...]:
    step = keys.size("decoder_sparse_step", default=1)
    listed = keys.indices("mlp_only_layers") or frozenset()
    return dense_layers(layers, lambda index: index not in listed and (index + 1) % step == 0)
