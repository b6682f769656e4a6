"""Granite: Llama with multipliers, which change no size."""

from __future__ import annotations

from ullage.model.families import llama
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return llama.spec(keys)
