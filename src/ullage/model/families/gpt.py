"""``model_type: gpt``: ullage's own format for a model that is no Hugging Face architecture (docs/job.md), and Megatron's models.

Every key is known or an error. A key left out takes GPT-3's choice: learned positions, layer norms, gelu, bias, tied embeddings;
dropout is 0 unless given. bias: on every linear but the head and the router, as Megatron's --disable-bias-linear has it.
"""

from __future__ import annotations

from typing import Final

from ullage.errors import Contradiction
from ullage.model.keys import Keys
from ullage.model.spec import DecoderSpec, Experts, Latent
from ullage.model.standard import dense_layers, head_size

MAIN_KEYS: Final = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "position",
    "norm",
    "mlp",
    "bias",
    "tie_word_embeddings",
)

KEYS: Final = (
    "model_type",
    *MAIN_KEYS,
    "qkv_bias",
    "hidden_dropout",
    "attention_dropout",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "moe_layer_freq",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_nextn_predict_layers",
)

_MLPS: Final = {
    "gelu": ("gelu", False),
    "swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "relu": ("relu", False),
    "squared-relu": ("squared-relu", False),
}


def spec(keys: Keys) -> DecoderSpec:
    hidden = keys.size("hidden_size")
    layers = keys.layers("num_hidden_layers")
    heads = keys.size("num_attention_heads")
    position = keys.choice("position", allowed=("learned", "rope", "alibi", "none"), default="learned")
    act, glu = _MLPS[keys.choice("mlp", allowed=tuple(_MLPS), default="gelu")]
    bias = keys.flag("bias", default=True)
    ffn = keys.size("intermediate_size", default=_ffn(hidden, glu))
    latent = _latent(keys)
    return DecoderSpec(
        name="",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else keys.size("num_key_value_heads", default=heads),
        head_dim=latent.qk_nope_dim + latent.qk_rope_dim if latent else head_size(keys, hidden, heads),
        ffn=ffn,
        vocab=keys.size("vocab_size"),
        mlp=act,
        glu=glu,
        norm=keys.choice("norm", allowed=("layernorm", "rmsnorm"), default="layernorm"),
        qkv_bias=keys.flag("qkv_bias", default=bias),
        out_bias=bias,
        mlp_bias=bias,
        fused_qkv=latent is None,
        fused_gate_up=glu,
        positions=position,
        max_positions=_positions(keys, position),
        tied=keys.flag("tie_word_embeddings", default=True),
        hidden_dropout=keys.rate("hidden_dropout"),
        attention_dropout=keys.rate("attention_dropout"),
        experts=_experts(keys, layers, ffn, bias),
        latent=latent,
        mtp_layers=keys.count("num_nextn_predict_layers", default=0),
    )


def _ffn(hidden: int, glu: bool) -> int:
    """Megatron's default: 4 x hidden; two thirds of it, in multiples of 64, where it is gated (arguments.py)."""
    return max(hidden * 8 // 3 // 64 * 64, 64) if glu else 4 * hidden


def _positions(keys: Keys, position: str) -> int:
    """A learned table has rows; else the number is no size of anything."""
    if position == "learned":
        return keys.size("max_position_embeddings")
    return keys.context("max_position_embeddings")


def _experts(keys: Keys, layers: int, ffn: int, bias: bool) -> Experts | None:
    count = keys.count("num_experts", default=0)
    if not count:
        _alone(keys, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        return None
    first = keys.count("first_k_dense_replace", default=0)
    every = keys.size("moe_layer_freq", default=1)
    return Experts(
        count=count,
        top_k=keys.size("num_experts_per_tok", default=2),
        ffn=keys.size("moe_intermediate_size", default=ffn),
        shared_ffn=keys.count("shared_expert_intermediate_size", default=0),
        dense_layers=dense_layers(layers, lambda index: index >= first and index % every == 0),
        expert_bias=bias,
    )


def _latent(keys: Keys) -> Latent | None:
    rank = keys.optional("kv_lora_rank")
    if rank is None:
        _alone(keys, "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return None
    return Latent(
        q_rank=keys.optional("q_lora_rank"),
        kv_rank=rank,
        qk_nope_dim=keys.size("qk_nope_head_dim"),
        qk_rope_dim=keys.size("qk_rope_head_dim"),
        v_dim=keys.size("v_head_dim"),
    )


def _alone(keys: Keys, needed: str, *others: str) -> None:
    """Keys that say nothing without needed; 0 and null say nothing anyway."""
    for name in others:
        if keys.count(name, default=0):
            raise Contradiction(f"says nothing without {needed}", key=f"model.{name}", remedy=f"give {needed} too")
