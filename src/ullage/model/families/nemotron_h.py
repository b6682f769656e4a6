"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: Mamba-2, attention and MLPs or experts, one branch to a layer, in the order of a pattern.

Attention turns nothing and experts have no gate. transformers' class leaves attention_bias out; the first releases' own code has it, and
so has Megatron's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts, Mamba
from ullage.model.standard import standard

_MIXERS: Final = {
    "M": "mamba", "*": "attention", "-": "mlp", "E": "moe",
    "linear_attention": "mamba", "full_attention": "attention", "mlp": "mlp", "moe": "moe",
    "mamba": "mamba", "attention": "attention",
}  # fmt: skip
"""Letters of hybrid_override_pattern; words of layers_block_type, of transformers 5.24 and, last, of 5.0."""
_PREDICTING: Final = "*E"


def spec(keys: Keys) -> DecoderSpec:
    head_dim = keys.size("attention_head_dim", default=128)
    base = standard(
        keys, activation="relu2", activation_key="mlp_hidden_act", kv_heads=8, head_dim=head_dim, vocab=131072
    )
    mixers = _mixers(keys, base.layers)
    bias = keys.flag("attention_bias", default=False)
    predicted = keys.count("num_nextn_predict_layers", default=0)
    if predicted:
        keys.choice("mtp_hybrid_override_pattern", allowed=(_PREDICTING,), default=_PREDICTING)
    return replace(
        base,
        glu=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias", default=False),
        positions="none",
        hidden_dropout=keys.rate("hidden_dropout"),
        mixers=mixers,
        mamba=_mamba(keys),
        experts=_experts(keys) if predicted or "moe" in mixers else None,
        mtp_layers=predicted,
        mtp_mixers=tuple(_MIXERS[letter] for letter in _PREDICTING),
    )


def _mixers(keys: Keys, layers: int) -> tuple[str, ...]:
    name = "layers_block_type" if keys.has("layers_block_type") else "hybrid_override_pattern"
    listed = keys.per_layer(name, layers)
    known = [_MIXERS[one] for one in listed or () if isinstance(one, str) and one in _MIXERS]
    if len(known) < layers:
        words = " | ".join(word for word in _MIXERS if len(word) > 1)
        raise keys.wrong(name, "letters of M, *, - and E" if name.startswith("hybrid") else f"a list of {words}")
    return tuple(known)


def _mamba(keys: Keys) -> Mamba:
    heads = keys.size("mamba_num_heads", default=128)
    groups = keys.size("n_groups", "mamba_n_groups", default=8)
    if heads % groups:
        raise keys.wrong("n_groups", f"a divisor of the {heads} heads of the scan")
    return Mamba(
        heads=heads,
        head_dim=keys.size("mamba_head_dim", default=64),
        state=keys.size("ssm_state_size", default=128),
        groups=groups,
        conv=keys.size("conv_kernel", "mamba_d_conv", default=4),
        chunk=keys.size("chunk_size", "mamba_chunk_size", default=128),
        conv_bias=keys.flag("use_conv_bias", "mamba_conv_bias", default=True),
        proj_bias=keys.flag("use_bias", default=False),
    )


def _experts(keys: Keys) -> Experts:
    return Experts(
        count=keys.size("n_routed_experts", default=8),
        top_k=keys.size("num_experts_per_tok", default=2),
        ffn=keys.size("moe_intermediate_size", default=7688),
        shared_ffn=keys.size("moe_shared_expert_intermediate_size", default=7688),
        normed=keys.flag("norm_topk_prob", default=True),
        latent=keys.optional("moe_latent_size"),
        score_bias=True,
    )
