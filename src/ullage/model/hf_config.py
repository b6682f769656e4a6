"""config.json -> DecoderSpec, by model_type. Each type is a file of families/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from ullage.errors import InvalidInput, UnknownKey, Unsupported, nearest
from ullage.model.config import ModelConfig
from ullage.model.keys import Keys
from ullage.model.mlp import XIELU
from ullage.model.spec import DecoderSpec

OWN_TYPE = "gpt"
_FAMILIES = Path(__file__).parent / "families"


class Reading(NamedTuple):
    """A spec, and what reading it showed: the keys that the family asks for and the defaults that it took."""

    spec: DecoderSpec
    asked: frozenset[str]
    defaults: tuple[str, ...]


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The architecture that ``config`` describes. InvalidInput for a key that is missing or wrong, Unsupported for its type."""
    return reading(config).spec


def has_encoder(config: ModelConfig) -> bool:
    """Whether a decoder reads what an encoder makes of another text."""
    return bool(config.model_type) and decoder_spec(config).encoder is not None


def defaults(config: ModelConfig) -> tuple[str, ...]:
    """``model.bias = true`` and its like, for a model of type gpt. A config.json leaves keys out as a matter of course: nothing to say."""
    return reading(config).defaults if config.model_type == OWN_TYPE else ()


@lru_cache(maxsize=256)
def reading(config: ModelConfig) -> Reading:
    """``decoder_spec`` with what it read."""
    keys = Keys(config.keys)
    if config.model_type == OWN_TYPE:
        _known_keys_only(config)
    spec = _family(config)(keys)
    _possible(spec)
    return Reading(
        replace(spec, name=config.name, family=config.model_type), frozenset(keys.asked), tuple(keys.defaults)
    )


@lru_cache(maxsize=1)
def supported() -> tuple[str, ...]:
    """Every model_type that can be read."""
    return tuple(sorted(path.stem for path in _FAMILIES.glob("[!_]*.py")))


def is_supported(model_type: object) -> bool:
    return isinstance(model_type, str) and _module_name(model_type) in supported()


def _module_name(model_type: str) -> str:
    return model_type.replace("-", "_")


def _family(config: ModelConfig) -> Callable[[Keys], DecoderSpec]:
    if not config.model_type:
        raise InvalidInput(
            "is missing", key="model.model_type", allowed=", ".join(supported()), remedy="or gpt, for any other decoder"
        )
    if not is_supported(config.model_type):
        raise _unsupported(config.model_type)
    family: Callable[[Keys], DecoderSpec] = import_module(
        f"ullage.model.families.{_module_name(config.model_type)}"
    ).spec
    return family


def _unsupported(model_type: str) -> Unsupported:
    from ullage.model.families import gpt

    near = nearest(_module_name(model_type), supported())
    guess = f"is {near} meant? " if near else ""
    return Unsupported(
        "is no architecture that ullage knows",
        key="model.model_type",
        value=model_type,
        allowed=", ".join(supported()),
        remedy=f"{guess}any decoder of attention and MLPs can be written as model_type: gpt with {', '.join(gpt.MAIN_KEYS)}",
    )


def _known_keys_only(config: ModelConfig) -> None:
    from ullage.model.families import gpt

    for key in config.keys:
        if key not in gpt.KEYS:
            near = nearest(key, gpt.KEYS)
            raise UnknownKey(
                "is no key of a model of type gpt",
                key=f"model.{key}",
                allowed=None if near else ", ".join(gpt.KEYS),
                remedy=f"did you mean {near}?" if near else None,
            )


def _possible(spec: DecoderSpec) -> None:
    """What two keys must have in common."""
    if spec.heads % spec.kv_heads:
        raise InvalidInput(
            f"{spec.heads} attention heads cannot share them evenly",
            key="model.num_key_value_heads",
            value=spec.kv_heads,
            allowed=f"a divisor of {spec.heads}",
        )
    if spec.mlp == XIELU and (spec.glu or spec.experts is not None):
        raise InvalidInput(
            "has parameters, which are modelled in a plain MLP alone",
            key="model.hidden_act",
            value=XIELU,
            remedy="model_type apertus has one",
        )
    if spec.experts is not None and spec.experts.top_k > spec.experts.count:
        raise InvalidInput(
            "is more than there are experts",
            key="model.num_experts_per_tok",
            value=spec.experts.top_k,
            allowed=f"at most {spec.experts.count}",
        )
