"""Hunyuan dense: Llama with a norm on each head of q and k."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.decoder import DecoderSpec
from ullage.model.families import llama
from ullage.model.keys import Keys


def spec(keys: Keys) -> DecoderSpec:
    return replace(llama.spec(keys), qk_norm="head", mlp_bias=False)
