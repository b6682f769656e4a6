"""GPT-NeoX and Pythia: attention and MLP in parallel behind two norms, bias everywhere but on the head."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=True)
    return replace(
        standard(keys, activation="gelu", rope_fraction=0.25),
        glu=False,
        norm="layernorm",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        fused_qkv=True,
        parallel_residual=keys.flag("use_parallel_residual", default=True),
        hidden_dropout=keys.rate("hidden_dropout"),
    )
