"""Mixtral: Mistral with every MLP a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts
from ullage.model.standard import sliding_window, standard, windows


def spec(keys: Keys) -> DecoderSpec:
    base = standard(keys, kv_heads=8)
    experts = Experts(
        count=keys.size("num_local_experts", "num_experts", default=8),
        top_k=keys.size("num_experts_per_tok", default=2),
        ffn=base.ffn,
    )
    return replace(base, experts=experts, windows=windows(keys, base.layers, sliding_window(keys)))
