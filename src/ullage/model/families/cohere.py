"""Command R: attention and MLP in parallel behind one layer norm without bias, a tied head."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    bias = keys.flag("attention_bias", default=False)
    return replace(
        standard(keys, tied=True),
        norm="layernorm",
        norm_bias=False,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="heads" if keys.flag("use_qk_norm", default=False) else None,
        parallel_residual=True,
        shared_norm=True,
    )
