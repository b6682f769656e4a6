"""BERT (arXiv 1810.04805): an encoder with norms behind the residual additions, and the head that ``architectures`` names."""

from __future__ import annotations

from ullage.errors import Unsupported
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import head_size
from ullage.model.task import MASKED, has_words, task_of

HEADS = (MASKED, "ForPreTraining", "ForSequenceClassification", "ForTokenClassification")


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size", default=768)
    heads = keys.size("num_attention_heads", default=12)
    act = keys.activation("hidden_act", default="gelu")
    drop = keys.rate("hidden_dropout_prob", default=0.1)
    if keys.flag("is_decoder", default=False):
        raise Unsupported(
            "makes a decoder of it, which is not modelled", key="model.is_decoder", value="true", remedy="leave it out"
        )
    task = task_of(keys, "Bert", HEADS, dropout=keys.rate("classifier_dropout", default=drop))
    tied = keys.flag("tie_word_embeddings", default=True)
    if has_words(task) and not tied:
        what = "leaves a second bias in the head, which nothing trains; that is not modelled"
        raise Unsupported(what, key="model.tie_word_embeddings", value="false", remedy="leave it out")
    return DecoderSpec(
        name="",
        layers=keys.layers("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(keys, hidden, heads),
        ffn=keys.size("intermediate_size", default=3072),
        vocab=keys.size("vocab_size", default=30522),
        mlp=act.act,
        mlp_form=act.form,
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
        max_positions=keys.size("max_position_embeddings", default=512),
        token_types=keys.size("type_vocab_size", default=2),
        types_first=True,
        tied=tied,
        hidden_dropout=drop,
        attention_dropout=keys.rate("attention_probs_dropout_prob", default=0.1),
        task=task,
    )
