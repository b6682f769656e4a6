"""ModelConfig -> Graph, remembered: the same configuration is read and built once."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ullage.model.config import ModelConfig
from ullage.model.decoder import build
from ullage.model.graph import Graph
from ullage.model.hf_config import OWN_TYPE, decoder_spec


@lru_cache(maxsize=128)
def graph(config: ModelConfig, *, mtp: bool = False) -> Graph:
    """What is trained, as a graph. InvalidInput or Unsupported where ``config`` cannot be read.

    mtp: whether the stack trains the multi-token prediction modules that a config.json names (num_nextn_predict_layers). Megatron can;
    transformers leaves them out, and published parameter counts do too. A model of type gpt trains those that it names.
    """
    spec = decoder_spec(config)
    if not mtp and config.model_type != OWN_TYPE:
        spec = replace(spec, mtp_layers=0)
    return build(spec)
