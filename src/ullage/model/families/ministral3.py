"""Ministral 3: Mistral without a window unless config.json has one, whose queries are scaled by their position."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard


def spec(keys: Keys) -> DecoderSpec:
    base = standard(keys, kv_heads=8, head_dim=128, vocab=131072)
    window = sliding_window(keys)
    return replace(base, windows=(window,) * base.layers if window else ())
