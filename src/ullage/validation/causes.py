"""Known causes of misses: a small hand-written TOML file, from patterns of record ids to a sentence each."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ullage.errors import InvalidInput


class Cause(NamedTuple):
    """``patterns``: shell globs over record ids; ``cause``: why these estimates are off."""

    patterns: tuple[str, ...]
    cause: str


def read_causes(path: Path) -> tuple[Cause, ...]:
    """``[[miss]]`` tables with ``records`` (a list of patterns) and ``cause``. InvalidInput for anything else."""
    place = str(path)
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("miss", [])
    except (OSError, ValueError) as error:  # ValueError: no TOML, no UTF-8
        raise InvalidInput(f"cannot be read: {error}", allowed="a TOML file of [[miss]] tables", place=place) from None
    return tuple(
        _cause(table, index, place) for index, table in enumerate(tables if isinstance(tables, list) else [tables])
    )


def _cause(table: object, index: int, place: str) -> Cause:
    if isinstance(table, dict) and table.keys() == {"records", "cause"}:
        patterns, cause = table["records"], table["cause"]
        if isinstance(cause, str) and isinstance(patterns, list) and all(isinstance(one, str) for one in patterns):
            return Cause(patterns=tuple(patterns), cause=" ".join(cause.split()))
    raise InvalidInput("is no miss", key=f"miss.{index}", allowed="records = [...] and cause = '...'", place=place)


def cause_of(record: str, causes: Sequence[Cause]) -> str | None:
    """The first cause whose pattern the id matches."""
    return next((one.cause for one in causes if any(fnmatchcase(record, pattern) for pattern in one.patterns)), None)
