"""Qwen2-VL, the text part: that of Qwen2.5-VL."""

from __future__ import annotations

from ullage.model.families import qwen2_5_vl_text
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    return qwen2_5_vl_text.spec(keys)
