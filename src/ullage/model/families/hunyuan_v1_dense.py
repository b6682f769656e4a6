"""Hunyuan dense: Llama with a norm on each head of q and k."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import llama
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return replace(llama.spec(keys), qk_norm="head", mlp_bias=False)
