"""The few numbers of an architecture that a layout must divide, from the common spellings of config.json."""

from __future__ import annotations

from collections.abc import Mapping

from ullage.frozen import frozen
from ullage.model.config import ModelConfig

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
    "scan_heads": ("mamba_num_heads",),
    "scan_groups": ("n_groups", "mamba_n_groups"),
    "nextn": ("num_nextn_predict_layers",),
}


@frozen
class Architecture:
    """None: the config does not say it under any name that is known, so nothing is checked against it."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    experts: int | None = None
    scan_heads: int | None = None
    scan_groups: int | None = None
    nextn: int | None = None
    latent_attention: bool = False


def architecture(config: ModelConfig) -> Architecture:
    """The numbers of ``config``; a vision-language config keeps its decoder's under ``text_config``."""
    inner = config.keys.get("text_config")
    keys: Mapping[str, object] = {**inner, **config.keys} if isinstance(inner, Mapping) else config.keys
    found = {name: _first(keys, spellings) for name, spellings in _SPELLINGS.items()}
    if found["kv_heads"] is None:  # multi-query is said by a flag in falcon, by nothing in gpt2: one head, or as many
        found["kv_heads"] = 1 if keys.get("multi_query") is True else found["heads"]
    return Architecture(**found, latent_attention=_first(keys, ("kv_lora_rank",)) is not None)


def _first(keys: Mapping[str, object], spellings: tuple[str, ...]) -> int | None:
    for name in spellings:
        value = keys.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
