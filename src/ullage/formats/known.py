"""The keys that an engine publishes, stored with source and date: to tell a misspelt key from one that no job holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import files

from ullage.errors import nearest
from ullage.formats.tree import Path, dotted


@lru_cache(maxsize=8)
def published(name: str) -> Mapping[str, object]:
    """data/NAME.json: ``keys`` (dotted), ``sections`` (whose keys are free or belong to no job), ``source``."""
    found: dict[str, object] = json.loads(files("ullage.formats").joinpath(f"data/{name}.json").read_text("utf-8"))
    return found


def names(name: str, part: str = "keys") -> tuple[str, ...]:
    found = published(name).get(part, ())
    assert isinstance(found, list)
    return tuple(map(str, found))


def why_left(name: str, reader: str) -> Callable[[Path], str]:
    """Says of a leaf that no job holds whether its engine knows it; if not, which key was meant."""
    keys = frozenset(names(name))
    sections = tuple((*section.split("."),) for section in names(name, "sections"))

    def why(path: Path) -> str:
        if dotted(path) in keys or any(path[: len(section)] == section for section in sections):
            return f"{reader} reads it, and no job says it"
        return f"{UNKNOWN} {reader} reads{_meant(path, keys, sections)}"

    return why


def what_then(name: str, path: Path) -> str:
    """What a key does that its engine does not know. data/NAME.json, ``strict``: the sections in which it stops the engine ("": the top
    alone, "*": everywhere)."""
    strict = names(name, "strict")
    here = "" if len(path) == 1 else path[0]
    if "*" in strict or here in strict:
        return str(published(name).get("stops", "it stops there"))
    return "it changes nothing"


UNKNOWN = "no key that"


def _meant(path: Path, keys: frozenset[str], sections: tuple[Path, ...]) -> str:
    near = nearest(dotted(path), keys) or nearest(path[-1], {key.rpartition(".")[2] for key in keys})
    if near is None:
        near = nearest(path[0], {section[0] for section in sections})
    return f"; did you mean {near}?" if near else ""
