"""Kimi K2: DeepSeek-V3 with more experts and fewer heads."""

from __future__ import annotations

from ullage.model.families import deepseek_v3
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return deepseek_v3.spec(keys)
