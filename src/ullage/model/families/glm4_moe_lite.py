"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts in smaller sizes."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.families import deepseek, deepseek_v2
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    base = deepseek_v2.with_latent(keys, standard(keys, head_dim=64), q_rank=768)
    experts = deepseek.experts(keys, base.layers, routed=64, dense=1, normed=True)
    return replace(
        base,
        experts=replace(experts, score_bias=True) if experts else None,
        mtp_layers=keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0),
    )
