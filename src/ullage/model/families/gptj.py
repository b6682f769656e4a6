"""GPT-J: attention and MLP in parallel behind one norm, rotary embedding on a part of each head, a head of its own with bias."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("n_embd", "hidden_size")
    heads = keys.size("n_head", "num_attention_heads")
    head_dim = head_size(keys, hidden, heads, key="n_head")
    act = keys.activation("activation_function", default="gelu_new")
    rotary_dim = keys.optional("rotary_dim") if keys.has("rotary_dim") else 64
    return DecoderSpec(
        name="",
        layers=keys.layers("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=keys.size("n_inner", default=4 * hidden),
        vocab=keys.size("vocab_size"),
        mlp=act.act,
        mlp_form=act.form,
        glu=False,
        norm="layernorm",
        mlp_bias=True,
        head_bias=True,
        parallel_residual=True,
        shared_norm=True,
        max_positions=keys.size("n_positions", "max_position_embeddings", default=2048),
        rope_fraction=min(1.0, (rotary_dim or head_dim) / head_dim),
        tied=keys.flag("tie_word_embeddings", default=False),
        hidden_dropout=keys.rate("resid_pdrop"),
        embedding_dropout=keys.rate("embd_pdrop"),
        attention_dropout=keys.rate("attn_pdrop"),
    )
