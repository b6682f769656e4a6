"""DeepSeek-V3 and R1: V2 with a balancing bias on the router and modules that predict further tokens."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import deepseek, deepseek_v2
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    base = deepseek_v2.with_latent(keys, standard(keys, head_dim=64))
    experts = deepseek.experts(keys, base.layers, routed=256, dense=3, normed=True)
    return replace(
        base,
        experts=replace(experts, score_bias=True) if experts else None,
        mtp_layers=keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0),
    )
