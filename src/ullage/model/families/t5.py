"""T5, v1.1 and FLAN-T5: an encoder and a decoder without biases, with positions as terms of the attention scores (arXiv 1910.10683)."""

from __future__ import annotations

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Encoder

_GATED = "gated-"
_FORMS = ("relu", "gelu", "gelu_new", "silu")


def spec(keys: Keys) -> DecoderSpec:
    return read(keys, form="relu")


def read(keys: Keys, *, form: str) -> DecoderSpec:
    """form: the MLP of a config.json that names none. gated-gelu is computed as gelu_new (transformers configuration_t5.py).

    Where the file says that the ends are not tied, as those of v1.1 do, checkpoints hold a head of their own, which is left by itself
    (transformers modeling_utils.py, tie_weights), and what it reads is not scaled.
    """
    allowed = (*_FORMS, *(f"{_GATED}{one}" for one in _FORMS))
    chosen = keys.choice("feed_forward_proj", allowed=allowed, default=form)
    act = "gelu_new" if chosen == "gated-gelu" else chosen.removeprefix(_GATED)
    heads = keys.size("num_heads", "num_attention_heads")
    layers = keys.layers("num_layers", "num_hidden_layers")
    tied = keys.flag("tie_word_embeddings", default=True) and keys.flag("scale_decoder_outputs", default=True)
    dropout = keys.rate("dropout_rate", default=0.1)
    return DecoderSpec(
        name="",
        layers=keys.optional("num_decoder_layers") or layers,
        hidden=keys.size("d_model", "hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=keys.size("d_kv", "head_dim", default=64),
        ffn=keys.size("d_ff"),
        vocab=keys.size("vocab_size", default=32128),
        mlp="gelu" if act.startswith("gelu") else act,
        mlp_form=act,
        glu=chosen.startswith(_GATED),
        positions="none",
        tied=tied,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        encoder=Encoder(
            layers=layers, buckets=keys.size("relative_attention_num_buckets", default=32), scaled_head=tied
        ),
    )
