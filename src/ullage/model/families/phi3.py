"""Phi-3, 3.5 and 4: Llama with q, k and v in one projection, gate and up in another."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    base = standard(keys)
    return replace(
        base,
        fused_qkv=True,
        fused_gate_up=True,
        hidden_dropout=keys.rate("resid_pdrop"),
        embedding_dropout=0.0,  # embd_pdrop is read by the class and not used by its forward
        windows=windows(keys, base.layers, sliding_window(keys)),
    )
