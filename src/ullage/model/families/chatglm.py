"""ChatGLM 2 and 3 and GLM-4 in their authors' keys."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    bias = keys.flag("add_bias_linear", default=False)
    qkv_bias = keys.flag("add_qkv_bias", default=False)
    grouped = keys.flag("multi_query_attention", default=False)
    groups = keys.size("multi_query_group_num", default=1)
    return DecoderSpec(
        name="",
        layers=keys.layers("num_layers", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=groups if grouped else heads,
        head_dim=keys.size("kv_channels", default=128),
        ffn=keys.size("ffn_hidden_size"),
        vocab=keys.size("padded_vocab_size", "vocab_size"),
        mlp="silu",
        norm="rmsnorm" if keys.flag("rmsnorm", default=True) else "layernorm",
        qkv_bias=bias or qkv_bias,
        out_bias=bias,
        mlp_bias=bias,
        final_norm=keys.flag("post_layer_norm", default=True),
        fused_qkv=True,
        fused_gate_up=True,
        rope_fraction=0.5,
        max_positions=keys.context("seq_length"),
        tied=keys.flag("tie_word_embeddings", default=False),
        hidden_dropout=keys.rate("hidden_dropout"),
        attention_dropout=keys.rate("attention_dropout"),
    )
