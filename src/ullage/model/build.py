"""ModelConfig -> Graph, remembered: the same configuration is read and built once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ullage.frozen import FrozenMap
from ullage.model import encoder_decoder
from ullage.model.config import ModelConfig
from ullage.model.decoder import build, sizes_of
from ullage.model.graph import Graph
from ullage.model.hf_config import OWN_TYPE, decoder_spec
from ullage.model.spec import DecoderSpec

MEGATRON_ARGUMENTS = ("mtp_use_repeated_layer", "position_embedding_type", "normalization", "qk_layernorm")
"""Arguments of Megatron-LM that say what a config.json, or a model of type gpt, has no key for."""

TARGET_LENGTH = "max_target_length"
"""Tokens of one sequence that a decoder behind an encoder makes, by the name that transformers' own examples have for it
(examples/pytorch/summarization/run_summarization.py)."""
CHECKPOINTED = "gradient_checkpointing"


@lru_cache(maxsize=128)
def graph(config: ModelConfig, *, mtp: bool = False, arguments: FrozenMap = FrozenMap()) -> Graph:
    """What is trained, as a graph. InvalidInput or Unsupported where ``config`` cannot be read.

    mtp: whether the stack trains the multi-token prediction modules that a config.json names (num_nextn_predict_layers). Megatron can;
    transformers leaves them out, and published parameter counts do too. A model of type gpt trains those that it names.
    arguments: of MEGATRON_ARGUMENTS; of an encoder and decoder TARGET_LENGTH, and whether layers are CHECKPOINTED.
    """
    spec = decoder_spec(config)
    if not mtp and config.model_type != OWN_TYPE:
        spec = replace(spec, mtp_layers=0)
    if spec.encoder is not None:
        target, asks = arguments.get(TARGET_LENGTH, 0), bool(arguments.get(CHECKPOINTED))
        assert isinstance(target, int)
        return encoder_decoder.build(spec, sizes_of(spec), target=target, asks=asks)
    return build(_told(spec, arguments))


@lru_cache(maxsize=128)
def table_of_positions(config: ModelConfig, arguments: FrozenMap = FrozenMap()) -> int | None:
    """The tokens that a learned table of positions has rows for; None where there is no table, and positions go on."""
    spec = _told(decoder_spec(config), arguments)
    return spec.max_positions or None if spec.positions == "learned" else None


def tokens_of_images(config: ModelConfig) -> int | None:
    """The tokens of every sequence of a model that reads images; None where it reads text."""
    patches = decoder_spec(config).patches
    return None if patches is None else patches.tokens


def _told(spec: DecoderSpec, arguments: FrozenMap) -> DecoderSpec:
    """Norms of queries and keys, of a model of type gpt; positions and norms of a hybrid, whose keys have none of the kinds that Megatron
    can give it. Of other models the keys say them, and latent attention has norms of its own."""
    if spec.family == OWN_TYPE and spec.latent is None and arguments.get("qk_layernorm") is True:
        spec = replace(spec, qk_norm="head")
    spec = replace(spec, mtp_repeated=arguments.get("mtp_use_repeated_layer") is True)
    if spec.mixers and arguments.get("position_embedding_type") == "learned_absolute":
        spec = replace(spec, positions="learned")
    if spec.mixers and arguments.get("normalization") == "LayerNorm":
        spec = replace(spec, norm="layernorm")
    return spec
