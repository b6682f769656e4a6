"""OLMo 2: norms after the branches instead of before, q and k normed over all heads."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    return replace(standard(keys), pre_norms=False, post_norms=True, qk_norm="all", qkv_bias=bias, out_bias=bias)
