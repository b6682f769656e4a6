"""Qwen1.5, 2 and 2.5: bias on q, k and v alone; a window on the upper layers where use_sliding_window says so."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    return replace(with_windows(keys, standard(keys)), qkv_bias=True)


def with_windows(keys: Keys, base: DecoderSpec, first: int = 28) -> DecoderSpec:
    """max_window_layers is the first layer with a window."""
    window = sliding_window(keys, 4096)
    if not keys.flag("use_sliding_window", default=False):
        window = None
    first = keys.count("max_window_layers", default=first)
    return replace(base, windows=windows(keys, base.layers, window, lambda index: index >= first))
