"""Qwen2.5-VL, the text part: Qwen2, turned by positions in time, height and width, whose tables are of each sequence."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import qwen2
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    return replace(qwen2.with_windows(keys, standard(keys, kv_heads=8), first=80), qkv_bias=True)
