"""SmolLM3: Llama with every fourth layer without rotary embedding."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import llama
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import rope_layers, sliding_window, windows


def spec(keys: Keys) -> DecoderSpec:
    base = llama.spec(keys)
    rotates = rope_layers(keys, base.layers)
    window = sliding_window(keys)
    if not keys.flag("use_sliding_window", default=False):
        window = None
    return replace(
        base,
        tied=keys.flag("tie_word_embeddings", default=True),
        rope_layers=rotates,
        windows=windows(keys, base.layers, window, lambda index: not rotates[index]),
    )
