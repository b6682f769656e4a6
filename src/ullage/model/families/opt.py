"""OPT: learned positions with two rows to spare, relu, bias everywhere but on the tied head."""

from __future__ import annotations

from ullage.errors import Unsupported
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size

POSITION_OFFSET = 2  # OPTLearnedPositionalEmbedding


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size")
    heads = keys.size("num_attention_heads")
    act = keys.activation("activation_function", default="relu")
    bias = keys.flag("enable_bias", default=True)
    if not keys.flag("do_layer_norm_before", default=True):
        raise Unsupported("norms after the residual (opt-350m) are not modelled", key="model.do_layer_norm_before")
    if keys.size("word_embed_proj_dim", default=hidden) != hidden:
        raise Unsupported("a projected embedding (opt-350m) is not modelled", key="model.word_embed_proj_dim")
    return DecoderSpec(
        name="",
        layers=keys.layers("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(keys, hidden, heads),
        ffn=keys.size("ffn_dim", "intermediate_size"),
        vocab=keys.size("vocab_size"),
        mlp=act.act,
        mlp_form=act.form,
        glu=False,
        norm="layernorm",
        norm_affine=keys.flag("layer_norm_elementwise_affine", default=True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        final_norm=not keys.flag("_remove_final_layer_norm", default=False),
        positions="learned",
        max_positions=keys.size("max_position_embeddings", default=2048),
        position_offset=POSITION_OFFSET,
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=keys.rate("dropout", default=0.1),
        embedding_dropout=0.0,
        attention_dropout=keys.rate("attention_dropout"),
    )
