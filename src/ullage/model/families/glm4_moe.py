"""GLM-4.5: plain attention with bias on q, k and v where it says so, DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import deepseek
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    base = standard(keys, kv_heads=8, rope_fraction=0.5)
    experts = deepseek.experts(keys, base.layers, routed=128, dense=1, normed=True)
    return replace(
        base,
        qkv_bias=keys.flag("attention_bias", default=False),
        qk_norm="head" if keys.flag("use_qk_norm", default=False) else None,
        experts=replace(experts, score_bias=True) if experts else None,
        mtp_layers=keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0),
    )
