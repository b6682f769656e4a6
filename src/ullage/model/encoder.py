"""Encoders in BERT's keys: norms behind the residual additions, learned positions, token types (arXiv 1810.04805)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ullage.errors import Unsupported
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size
from ullage.model.task import has_words, task_of


def norms_behind_sums(**own: Any) -> DecoderSpec:
    """BERT's layers: norms of the sums of stream and branch, biases everywhere, learned positions, no causal order. own: the rest."""
    return DecoderSpec(
        name="",
        glu=False,
        norm="layernorm",
        pre_norms=False,
        stream_norms=True,
        final_norm=False,
        embedding_norm=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        causal=False,
        positions="learned",
        **own,
    )


def bert_like(
    keys: Keys, prefix: str, heads: tuple[str, ...], *, vocab: int, drops_first: bool = False, position_offset: int = 0
) -> DecoderSpec:
    """prefix: of the family's classes; heads: of them those that are modelled, the default first. position_offset: rows of the table of
    positions that no sequence reaches. The defaults are those of BertConfig and its like, as config.json leaves them out."""
    hidden = keys.size("hidden_size", default=768)
    n_heads = keys.size("num_attention_heads", default=12)
    act = keys.activation("hidden_act", default="gelu")
    drop = keys.rate("hidden_dropout_prob", default=0.1)
    if keys.flag("is_decoder", default=False):
        raise Unsupported(
            "makes a decoder of it, which is not modelled", key="model.is_decoder", value="true", remedy="leave it out"
        )
    task = task_of(keys, prefix, heads, dropout=keys.rate("classifier_dropout", default=drop))
    tied = keys.flag("tie_word_embeddings", default=True)
    if has_words(task) and not tied:
        what = "leaves a second bias in the head, which nothing trains; that is not modelled"
        raise Unsupported(what, key="model.tie_word_embeddings", value="false", remedy="leave it out")
    rows = keys.size("max_position_embeddings", default=512)
    if rows <= position_offset:
        raise keys.wrong("max_position_embeddings", f"more than the {position_offset} rows up to pad_token_id")
    return norms_behind_sums(
        layers=keys.layers("num_hidden_layers"),
        hidden=hidden,
        heads=n_heads,
        kv_heads=n_heads,
        head_dim=head_size(keys, hidden, n_heads),
        ffn=keys.size("intermediate_size", default=3072),
        vocab=keys.size("vocab_size", default=vocab),
        mlp=act.act,
        mlp_form=act.form,
        max_positions=rows - position_offset,
        position_offset=position_offset,
        token_types=keys.size("type_vocab_size", default=2),
        types_first=True,
        tied=tied,
        hidden_dropout=drop,
        attention_dropout=keys.rate("attention_probs_dropout_prob", default=0.1),
        task=replace(task, drops_first=drops_first),
    )
