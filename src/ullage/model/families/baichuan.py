"""Baichuan 1 and 2: Llama with q, k and v in one projection. The 13B models use ALiBi, and say so by model_max_length alone."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    rotates = keys.has("max_position_embeddings")  # 13B: model_max_length
    base = replace(standard(keys), fused_qkv=True)
    if rotates:
        return base
    return replace(base, positions="alibi", max_positions=keys.context("model_max_length"))
