"""Gemma 2: norms before and after each branch, every second layer with a window, soft-capped scores and logits."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import capped, sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, activation="gelu_pytorch_tanh", activation_key="hidden_activation", head_dim=256, tied=True)
    return replace(
        base,
        qkv_bias=bias,
        out_bias=bias,
        post_norms=True,
        windows=windows(keys, base.layers, sliding_window(keys, 4096), lambda index: index % 2 == 0),
        attention_softcap=capped(keys, "attn_logit_softcapping", default=True),
        logits_softcap=capped(keys, "final_logit_softcapping", default=True),
    )
