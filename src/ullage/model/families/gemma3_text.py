"""Gemma 3, the text part: Gemma 2 with normed heads instead of soft-capping, and five windowed layers to a full one.

The multimodal releases leave most keys to the configuration class, so its sizes stand here as defaults.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import capped, sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(
        keys,
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        heads=8,
        kv_heads=4,
        head_dim=256,
        vocab=262208,
        tied=True,
    )
    every = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    return replace(
        base,
        qkv_bias=bias,
        out_bias=bias,
        post_norms=True,
        qk_norm="head",
        windows=windows(keys, base.layers, sliding_window(keys, 4096), lambda index: (index + 1) % every != 0),
        attention_softcap=capped(keys, "attn_logit_softcapping", default=False),
        logits_softcap=capped(keys, "final_logit_softcapping", default=False),
    )
