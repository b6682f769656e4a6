"""StarCoder 2: layer norms, a plain gelu MLP, bias everywhere but on the tied head."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("use_bias", default=True)
    base = standard(keys, activation="gelu_pytorch_tanh", kv_heads=2, tied=True)
    return replace(
        base,
        glu=False,
        norm="layernorm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        windows=windows(keys, base.layers, sliding_window(keys)),
        hidden_dropout=keys.rate("residual_dropout"),
        embedding_dropout=keys.rate("embedding_dropout"),
    )
