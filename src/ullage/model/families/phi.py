"""Phi-1 to 2: attention and MLP in parallel behind one norm, bias everywhere, the head's included."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    return replace(
        standard(keys, activation="gelu_new", rope_fraction=0.5),
        glu=False,
        norm="layernorm",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm="head" if keys.flag("qk_layernorm", default=False) else None,
        parallel_residual=True,
        shared_norm=True,
        hidden_dropout=keys.rate("resid_pdrop"),
        embedding_dropout=keys.rate("embd_pdrop"),
    )
