"""Apertus (arXiv 2509.14233): Llama with a norm on each head of q and k, and a plain MLP whose activation, xIELU, has parameters."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, activation="xielu", vocab=131072)
    return replace(base, glu=False, qkv_bias=bias, out_bias=bias, qk_norm="head")
