"""Command R7B and Command A: Command R with a window on three layers of four, which alone turn their queries and keys."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import cohere
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, windows


def spec(keys: Keys) -> DecoderSpec:
    base = cohere.spec(keys)
    every = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=4)
    sliding = windows(keys, base.layers, sliding_window(keys, 4096), lambda index: (index + 1) % every != 0)
    return replace(
        base,
        qk_norm=None,
        windows=sliding,
        positions="rope" if any(sliding) else "none",
        rope_layers=tuple(window is not None for window in sliding),
    )
