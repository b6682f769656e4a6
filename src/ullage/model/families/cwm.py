"""Code World Model: Llama with a window on three layers of four, the first without one."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard, windows

_FULL_EVERY = 4


def spec(keys: Keys) -> DecoderSpec:
    base = standard(keys, kv_heads=8, head_dim=128, vocab=128256)
    window = sliding_window(keys, 8192)
    return replace(
        base,
        mlp_bias=keys.flag("mlp_bias", default=False),
        windows=windows(keys, base.layers, window, lambda index: index % _FULL_EVERY != 0),
    )
