"""OLMo 3: OLMo 2 with a window on three layers of four."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import olmo2
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, windows

_FULL_EVERY = 4


def spec(keys: Keys) -> DecoderSpec:
    base = olmo2.spec(keys)
    window = sliding_window(keys, 4096)
    return replace(base, windows=windows(keys, base.layers, window, lambda index: (index + 1) % _FULL_EVERY != 0))
