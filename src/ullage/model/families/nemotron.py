"""Nemotron-4 and Minitron: layer norms of one plus their weight, half of each head rotates, a plain MLP of squared relu."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    return replace(
        standard(keys, activation="relu2", rope_fraction=0.5),
        glu=False,
        norm="layernorm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias", default=False),
    )
