"""Kimi K2: DeepSeek-V3 with more experts and fewer heads."""

from __future__ import annotations

from ullage.model.decoder import DecoderSpec
from ullage.model.families import deepseek_v3
from ullage.model.keys import Keys


def spec(keys: Keys) -> DecoderSpec:
    return deepseek_v3.spec(keys)
