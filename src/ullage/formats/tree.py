"""A configuration file as leaves: path -> value, with the line of each, whatever its syntax.

Each syntax (jsonc.py, yaml_text.py, toml_text.py, shell_text.py) parses a text into a ``Tree``, renders one, and sets or removes
one leaf of a text, leaving every other character as its author wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ullage.errors import InvalidInput
from ullage.frozen import frozen

Path = tuple[str, ...]
Leaves = Mapping[Path, object]

DEEPEST = 24


@frozen
class Tree:
    """leaves: in the file's order; lines: of each leaf, from 1; complaints: (line, what) that a strict parser would refuse."""

    leaves: Leaves
    lines: Mapping[Path, int]
    complaints: tuple[tuple[int, str], ...] = ()


class Syntax(Protocol):
    """What a syntax module offers; ``place`` is the file's name in messages."""

    def parse(self, text: str, place: str) -> Tree: ...

    def render(self, leaves: Leaves, comments: tuple[str, ...] = ()) -> str: ...

    def put(self, text: str, path: Path, value: object) -> str: ...

    def drop(self, text: str, path: Path) -> str: ...


def dotted(path: Path) -> str:
    return ".".join(path)


def flat(values: Mapping[str, object], place: str, above: Path = ()) -> dict[Path, object]:
    """Nested mappings as leaves; an empty mapping is a leaf, and so is a list. InvalidInput where it nests too deep."""
    if len(above) > DEEPEST:
        raise InvalidInput(f"is nested deeper than {DEEPEST} levels", remedy="no configuration needs that", place=place)
    found: dict[Path, object] = {}
    for name, value in values.items():
        path = (*above, str(name))
        if isinstance(value, Mapping) and value:
            found.update(flat(value, place, path))
        else:
            found[path] = value
    return found


def nested(leaves: Leaves) -> dict[str, object]:
    """The inverse of ``flat``; a leaf that stands where another's mapping must be gives way to it."""
    root: dict[str, object] = {}
    for path, value in leaves.items():
        section = root
        for part in path[:-1]:
            inner = section.get(part)
            if not isinstance(inner, dict):
                inner = section[part] = {}
            section = inner
        section[path[-1]] = value
    return root
