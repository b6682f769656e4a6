"""Ministral 8B: Mistral whose layers may have a window or none."""

from __future__ import annotations

from ullage.model.families import mistral
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return mistral.spec(keys)
