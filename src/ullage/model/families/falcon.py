"""Falcon: attention and MLP in parallel, behind one norm (7B) or two (the new decoder architecture: 40B, 180B)."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads", "n_head")
    new = keys.flag("new_decoder_architecture", default=False)
    multi_query = keys.flag("multi_query", default=True)
    kv_heads = keys.size("num_kv_heads", "n_head_kv", default=heads)
    parallel = keys.flag("parallel_attn", default=True) or new
    norms = keys.size("num_ln_in_parallel_attn", default=2 if new else 1)
    alibi = keys.flag("alibi", default=False)
    act = keys.activation("activation", default="gelu")
    bias = keys.flag("bias", default=False)
    return DecoderSpec(
        name="",
        layers=keys.layers("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if new else 1 if multi_query else heads,
        head_dim=head_size(keys, hidden, heads),
        ffn=keys.size("ffn_hidden_size", default=4 * hidden),
        vocab=keys.size("vocab_size"),
        mlp=act.act,
        mlp_form=act.form,
        glu=False,
        norm="layernorm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        parallel_residual=parallel,
        shared_norm=parallel and norms == 1,
        fused_qkv=True,
        positions="alibi" if alibi else "rope",
        max_positions=keys.context("max_position_embeddings"),
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=keys.rate("hidden_dropout"),
        embedding_dropout=0.0,
        attention_dropout=keys.rate("attention_dropout"),
    )
