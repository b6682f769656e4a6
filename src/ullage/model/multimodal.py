"""The decoder in a multimodal model's config.json: under which key it stands, what its type is called, and what it leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ullage.frozen import FrozenMap

SECTIONS: Final = ("text_config", "llm_config", "language_config")
"""transformers' own models; OpenGVLab's InternVL and NVIDIA's; DeepSeek's."""
_TOWERS: Final = ("vision_config", "audio_config", "mm_vision_tower")
_OUTER: Final = ("tie_word_embeddings",)
"""Said outside of the decoder's section as often as in it."""

_TYPES: Final[Mapping[str, str]] = {
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "llava": "llama",
    "llava_llama": "llama",
    "llava_mistral": "mistral",
    "llava_qwen": "qwen2",
}
"""Whose files, or first files, have all keys of the decoder flat beside a tower: Qwen, haotian-liu/LLaVA and LLaVA-NeXT."""

_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
}
"""Of the configuration classes of transformers 5.24.0: a section within a file holds only what differs from them
(configuration_utils.py, ``to_diff_dict``)."""


def decoder_type(model_type: object) -> object:
    """The type whose layers these are."""
    return _TYPES.get(model_type, model_type) if isinstance(model_type, str) else model_type


def decoder_section(keys: FrozenMap) -> FrozenMap | None:
    """The decoder's own section, or None where the file has none."""
    return next((found for name in SECTIONS if isinstance(found := keys.get(name), FrozenMap)), None)


def decoder_keys(keys: FrozenMap, section: FrozenMap) -> FrozenMap:
    """The section's keys with what it leaves to its class, and what stands outside of it."""
    model_type = decoder_type(section.get("model_type"))
    defaults = _DEFAULTS.get(str(model_type), {})
    outer = {key: keys[key] for key in _OUTER if key in keys}
    return FrozenMap({**defaults, **outer, **section, "model_type": model_type})


def others(keys: FrozenMap) -> tuple[str, ...]:
    """What a file says of its other parts: the sections of towers, or LLaVA's name of one; model_type where it says nothing."""
    towers = tuple(name for name in keys if name.endswith(_TOWERS) and keys[name])
    return towers or ("model_type",)
