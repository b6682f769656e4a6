"""GPT-2: learned positions, layer norms, gelu, bias everywhere but on the tied head."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("n_embd", "hidden_size")
    heads = keys.size("n_head", "num_attention_heads")
    act = keys.activation("activation_function", default="gelu_new")
    return DecoderSpec(
        name="",
        layers=keys.layers("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(keys, hidden, heads, key="n_head"),
        ffn=keys.size("n_inner", default=4 * hidden),
        vocab=keys.size("vocab_size"),
        mlp=act.act,
        mlp_form=act.form,
        glu=False,
        norm="layernorm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        fused_qkv=True,
        positions="learned",
        max_positions=keys.size("n_positions", "max_position_embeddings", "n_ctx"),
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=keys.rate("resid_pdrop", default=0.1),
        embedding_dropout=keys.rate("embd_pdrop", default=0.1),
        attention_dropout=keys.rate("attn_pdrop", default=0.1),
    )
