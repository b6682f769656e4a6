"""Mistral: Llama with a sliding window, which is there unless config.json says null."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    base = standard(keys, kv_heads=8)
    return replace(base, windows=windows(keys, base.layers, sliding_window(keys, 4096)))
