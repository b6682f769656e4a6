"""StableLM 2 and 3B: layer norms around a gated MLP, rotary embedding on a quarter of each head."""

from __future__ import annotations

from dataclasses import replace

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec
from ullage.model.standard import standard


def spec(keys: Keys) -> DecoderSpec:
    parallel = keys.flag("use_parallel_residual", default=False)
    return replace(
        standard(keys, rope_fraction=0.25),
        norm="layernorm",
        qkv_bias=keys.flag("use_qkv_bias", default=False),
        qk_norm="heads" if keys.flag("qk_layernorm", default=False) else None,
        parallel_residual=parallel,
        shared_norm=parallel,
        hidden_dropout=keys.rate("hidden_dropout"),
        embedding_dropout=0.0,
    )
