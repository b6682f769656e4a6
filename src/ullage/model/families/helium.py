"""Helium: Llama whose heads fill the hidden size, and whose output projection never has a bias."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import llama
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec


def spec(keys: Keys) -> DecoderSpec:
    base = replace(llama.spec(keys), head_dim=keys.size("head_dim", default=128), out_bias=False)
    if base.heads * base.head_dim != base.hidden:
        allowed = f"{base.hidden // base.heads}, for {base.heads} heads in a hidden size of {base.hidden}"
        raise keys.wrong("head_dim", allowed)
    return base
