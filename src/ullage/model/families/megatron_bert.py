"""Megatron's BERT: an encoder with norms before the branches, and BERT's heads for pre-training (masked tokens, next sentence)."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    act = keys.activation("hidden_act", default="gelu")
    return DecoderSpec(
        name="",
        layers=keys.layers("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(keys, hidden, heads),
        ffn=keys.size("intermediate_size"),
        vocab=keys.size("vocab_size"),
        mlp=act.act,
        mlp_form=act.form,
        glu=False,
        norm="layernorm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        bert_head=True,
        causal=False,
        positions="learned",
        max_positions=keys.size("max_position_embeddings", default=512),
        token_types=keys.size("type_vocab_size", default=2),
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=keys.rate("hidden_dropout_prob", default=0.1),
        attention_dropout=keys.rate("attention_probs_dropout_prob", default=0.1),
    )
