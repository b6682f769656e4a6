"""dots.llm1: Qwen3's attention, a window on the upper layers where max_window_layers says so, and DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import deepseek
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    base = standard(keys, kv_heads=32)
    first = keys.count("max_window_layers", default=62)
    experts = deepseek.experts(keys, base.layers)
    return replace(
        base,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        windows=windows(keys, base.layers, sliding_window(keys, 4096), lambda index: index >= first),
        experts=replace(experts, score_bias=True) if experts else None,
    )
