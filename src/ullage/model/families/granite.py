"""Granite: Llama with multipliers, which change no size."""

from __future__ import annotations

from ullage.model.decoder import DecoderSpec
from ullage.model.families import llama
from ullage.model.keys import Keys


def spec(keys: Keys) -> DecoderSpec:
    return llama.spec(keys)
