"""DistilBERT (arXiv 1910.01108): half of BERT's layers without its token types and pooler, in keys of its own."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.encoder import norms_behind_sums
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size
from ullage.model.task import MASKED, task_of

HEADS = (MASKED, "ForSequenceClassification", "ForTokenClassification")


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("dim", "hidden_size", default=768)
    heads = keys.size("n_heads", "num_attention_heads", default=12)
    act = keys.activation("activation", default="gelu")
    drop = keys.rate("dropout", default=0.1)
    task = task_of(keys, "DistilBert", HEADS, dropout=keys.rate("seq_classif_dropout", default=0.2))
    return norms_behind_sums(
        layers=keys.layers("n_layers", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(keys, hidden, heads, key="n_heads"),
        ffn=keys.size("hidden_dim", default=3072),
        vocab=keys.size("vocab_size", default=30522),
        mlp=act.act,
        mlp_form=act.form,
        max_positions=keys.size("max_position_embeddings", default=512),
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=drop,
        attention_out_dropout=False,
        attention_dropout=keys.rate("attention_dropout", default=0.1),
        task=replace(task, pooler_act="relu", dropout=drop if task.kind == "tokens" else task.dropout),
    )
