"""EXAONE 4.0: norms after the branches, a norm on each head of q and k; where layers have windows, the full ones turn nothing."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    base = standard(keys, kv_heads=32)
    window = sliding_window(keys, 4096)
    # the releases write a pattern of letters beside layer_types, which the class reads instead
    listed = keys.per_layer("layer_types", base.layers) is not None
    every = 1 if listed or window is None else keys.size("sliding_window_pattern", default=4)
    sliding = windows(keys, base.layers, window, lambda index: (index + 1) % every != 0)
    return replace(
        base,
        pre_norms=False,
        post_norms=True,
        qk_norm="head",
        windows=sliding,
        rope_layers=tuple(window is not None for window in sliding),
    )
