"""Qwen3.5's decoder with experts, in every layer."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import qwen3_next
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    base = qwen3_next.with_delta(keys, joined=False, ffn=0)
    return replace(base, experts=qwen3_next.experts(keys, count=256, top_k=8))
