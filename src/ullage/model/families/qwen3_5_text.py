"""Qwen3.5's decoder: gated DeltaNet in all layers but each fourth, as in Qwen3-Next, from projections of their own; dense."""

from __future__ import annotations

from ullage.model.families import qwen3_next
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return qwen3_next.with_delta(keys, joined=False, kv_heads=4)
