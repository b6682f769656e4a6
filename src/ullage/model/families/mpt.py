"""MPT: ALiBi (or learned positions), layer norms without bias, a tied head."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("d_model", "hidden_size")
    heads = keys.size("n_heads", "num_attention_heads")
    attention = keys.nested("attn_config")
    bias = not keys.flag("no_bias", default=True)
    learned = keys.flag("learned_pos_emb", default=True)
    alibi = attention.flag("alibi", default=True)
    return DecoderSpec(
        name="",
        layers=keys.layers("n_layers", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=attention.size("kv_n_heads", default=heads),
        head_dim=head_size(keys, hidden, heads, key="n_heads"),
        ffn=keys.size("expansion_ratio", default=4) * hidden,
        vocab=keys.size("vocab_size"),
        mlp="gelu",
        glu=False,
        norm="layernorm",
        norm_bias=bias,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qk_norm="all" if attention.flag("qk_ln", default=False) else None,
        fused_qkv=True,
        positions="alibi" if alibi else "learned" if learned else "none",
        max_positions=keys.size("max_seq_len", "max_position_embeddings", default=2048),
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=keys.rate("resid_pdrop"),
        embedding_dropout=keys.rate("emb_pdrop"),
        attention_dropout=attention.rate("attn_pdrop"),
    )
