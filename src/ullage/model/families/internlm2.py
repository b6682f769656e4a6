"""InternLM 2: Llama with q, k and v in one projection."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("bias", default=False)  # the class says true, every published model false
    return replace(standard(keys), qkv_bias=bias, out_bias=bias, fused_qkv=True)
