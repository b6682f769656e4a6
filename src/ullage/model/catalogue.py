"""Which model a person means: a name of the catalogue, a Hugging Face id in it, a path, or the keys themselves.

The catalogue is data/models/: index.json and one config.json per model. Nothing but the index and the one file is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ullage.errors import InvalidInput, UllageError, UnknownKey, UnknownName, Unsupported, nearest
from ullage.frozen import FrozenMap
from ullage.model.config import ModelConfig
from ullage.model.config_file import plain_keys, read_config
from ullage.model.hf_config import OWN_TYPE, decoder_spec, is_supported, reading
from ullage.model.multimodal import decoder_keys, decoder_section, decoder_type, others

_DATA = Path(__file__).parent / "data" / "models"
_ALLOWED = "a catalogue name, a path to a config.json or to a folder with one, or a mapping in config.json's keys"
_CLOSE = 0.9  # a misspelt key, not another one: num_key_value_head


class Entry(NamedTuple):
    """published_parameters: as the maker or the released weights state it. published: how it compares to ``parameters``,
    which are counted: exact | explained | rounded (only a rounded number is known) | whole-model (it includes a vision tower).
    also: ids of releases with the same architecture.
    """

    name: str
    file: str
    hugging_face_id: str
    model_type: str
    parameters: int
    published_parameters: int
    published: str
    source: str
    also: tuple[str, ...]


def model_config(spec: str | Mapping[str, object], base_dir: Path | None = None) -> ModelConfig:
    """The configuration that ``spec`` names, read and checked; paths are relative to ``base_dir`` or else the working directory.

    Raises UnknownName for a name or id that the catalogue has not, UnknownKey for a misspelt key, InvalidInput for a file or value
    that is wrong, Unsupported for an architecture that is not modelled.
    """
    if isinstance(spec, Mapping):
        keys = plain_keys(spec)
        return _overridden(keys, base_dir) if "base" in keys else _from_mapping(keys)
    return _named(spec, base_dir)


def _named(spec: object, base_dir: Path | None) -> ModelConfig:
    if not isinstance(spec, str) or not spec.strip():
        raise InvalidInput("is no model", key="model", value=repr(spec)[:60], allowed=_ALLOWED)
    entry = find(spec)
    if entry is not None:
        return _from_file(_DATA / entry.file, entry.name)
    path = (base_dir or Path()) / Path(spec).expanduser()
    if _is_path(spec, path):
        return _from_file(path, spec)
    raise _unknown(spec)


def names() -> tuple[str, ...]:
    """Every name of the catalogue, in alphabetical order."""
    return tuple(_index())


def entry(name: str) -> Entry:
    """What the catalogue says of a model; UnknownName if it has none of this name."""
    found = find(name)
    if found is None:
        raise _unknown(name)
    return found


def find(name: str) -> Entry | None:
    """By catalogue name or Hugging Face id, in any case; None if the catalogue has no such model."""
    key = _spellings().get(_folded(name))
    return _index()[key] if key else None


@lru_cache(maxsize=1)
def _index() -> dict[str, Entry]:
    raw: dict[str, dict[str, Any]] = json.loads((_DATA / "index.json").read_text(encoding="utf-8"))["models"]
    return {
        name: Entry(
            name=name,
            file=f"{name}.json",
            hugging_face_id=facts["hugging_face_id"],
            model_type=facts["model_type"],
            parameters=facts["parameters"],
            published_parameters=facts["published_parameters"],
            published=facts["published"],
            source=facts["source"],
            also=tuple(facts.get("also", ())),
        )
        for name, facts in sorted(raw.items())
    }


@lru_cache(maxsize=1)
def _spellings() -> dict[str, str]:
    """Folded name or id -> name. An id without its organisation counts too."""
    found: dict[str, str] = {}
    for name, facts in _index().items():
        for spelling in (facts.hugging_face_id, *facts.also):
            found.setdefault(_folded(spelling.rpartition("/")[2]), name)
            found[_folded(spelling)] = name
    return found | {_folded(name): name for name in _index()}


def _folded(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _is_path(spec: str, path: Path) -> bool:
    """Something that is there, or that can be meant as nothing else; org/name is an id until such a path exists."""
    if spec.startswith((".", "/", "~")) or spec.endswith(".json") or spec.count("/") > 1 or "\\" in spec:
        return True
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or a NUL in it
        return False


def _unknown(name: str) -> UnknownName:
    spellings = _spellings()
    near = nearest(_folded(name), spellings) or nearest(_folded(name.rpartition("/")[2]), spellings)
    guess = f"nearest is {spellings[near]}; " if near else ""
    return UnknownName(
        "is not in the catalogue, and there is no such path",
        key="model",
        value=name[:80] if name.isprintable() else repr(name[:80]),
        allowed=_ALLOWED,
        remedy=f"{guess}download the model's config.json and give its path (ullage models lists the catalogue)",
    )


def _from_file(path: Path, name: str) -> ModelConfig:
    keys, place = read_config(path)
    try:
        return _checked(keys, name)
    except UllageError as error:
        raise error.at(place) from None


def _from_mapping(keys: FrozenMap) -> ModelConfig:
    config = _checked(keys, str(keys.get("model_type", "model")))
    if config.model_type != OWN_TYPE:
        _no_misspelling(keys, config)
    return config


def _overridden(keys: FrozenMap, base_dir: Path | None) -> ModelConfig:
    """``{base: name, key: value}``: the base's configuration with these keys changed."""
    base_name = keys["base"]
    if not isinstance(base_name, str):
        raise InvalidInput("is no model", key="model.base", value=base_name, allowed="a catalogue name or a path")
    base = model_config(base_name, base_dir)
    changes = {key: value for key, value in keys.items() if key != "base"}
    known = set(base.keys) | reading(base).asked
    for key in changes:
        if key not in known:
            raise _unknown_key(key, known, f"is no key of {base.name}")
    changed = FrozenMap({**base.keys, **changes})
    return _checked(changed, f"{base.name} changed" if changes else base.name)


def _no_misspelling(keys: FrozenMap, config: ModelConfig) -> None:
    """A config.json has many keys that are no architecture, so one is an error only where it is nearly, but not quite, one that is."""
    import difflib

    known = reading(config).asked
    missing = known - set(keys)
    for key in keys:
        if key not in known and difflib.get_close_matches(key, missing, n=1, cutoff=_CLOSE):
            raise _unknown_key(key, missing, f"is no key of a model of type {config.model_type}")


def _unknown_key(key: str, known: Iterable[str], what: str) -> UnknownKey:
    near = nearest(key, known)
    allowed = None if near else ", ".join(sorted(known))
    return UnknownKey(what, key=f"model.{key}", allowed=allowed, remedy=f"did you mean {near}?" if near else None)


def _checked(keys: FrozenMap, name: str) -> ModelConfig:
    """The configuration, or that of its text part where it is multimodal; read once, so that an error comes now and with its place."""
    config = ModelConfig(name=name, keys=keys)
    section = decoder_section(keys)
    if not is_supported(config.model_type) and section is not None:
        if not is_supported(decoder_type(section.get("model_type"))):
            raise Unsupported(
                f"is multimodal, and of its text part's type {section.get('model_type')!r} there is no model",
                key="model.model_type",
                value=config.model_type or "(none)",
                remedy="write the text part as a mapping of a supported type",
            )
        config = ModelConfig(name=f"{name} (text part)", keys=decoder_keys(keys, section), beside=others(keys))
    elif not is_supported(config.model_type) and is_supported(decoder_type(config.model_type)):
        flat = FrozenMap({**keys, "model_type": decoder_type(config.model_type)})
        config = ModelConfig(name=f"{name} (text part)", keys=flat, beside=others(keys))
    decoder_spec(config)
    return config
