"""Llama 4, the text part: sparse layers with one shared expert, dense layers wider; chunked attention where it rotates."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import dense_layers, rope_layers, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, kv_heads=8, head_dim=128)
    rotates = rope_layers(keys, base.layers)
    chunk = keys.optional("attention_chunk_size") if keys.has("attention_chunk_size") else 8192
    step = keys.size("interleave_moe_layer_step", default=1)
    listed = keys.indices("moe_layers")
    return replace(
        base,
        ffn=keys.size("intermediate_size_mlp", default=16384),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="unscaled" if keys.flag("use_qk_norm", default=True) else None,
        rope_layers=rotates,
        windows=windows(keys, base.layers, chunk, lambda index: rotates[index]),
        experts=Experts(
            count=keys.size("num_local_experts", default=16),
            top_k=keys.size("num_experts_per_tok", default=1),
            ffn=base.ffn,
            shared_ffn=base.ffn,
            dense_layers=dense_layers(
                base.layers, lambda index: index in listed if listed is not None else (index + 1) % step == 0
            ),
        ),
    )
