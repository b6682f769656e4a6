"""BLOOM: ALiBi, a norm behind the embedding, bias everywhere but on the tied head."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size", "n_embed")
    heads = keys.size("n_head", "num_attention_heads")
    return DecoderSpec(
        name="",
        layers=keys.layers("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(keys, hidden, heads, key="n_head"),
        ffn=4 * hidden,
        vocab=keys.size("vocab_size"),
        mlp="gelu",
        mlp_form="bloom_gelu",
        glu=False,
        norm="layernorm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        fused_qkv=True,
        embedding_norm=True,
        positions="alibi",
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=keys.rate("hidden_dropout"),
        embedding_dropout=0.0,
        attention_dropout=keys.rate("attention_dropout"),
    )
