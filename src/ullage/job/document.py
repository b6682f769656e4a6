"""A job as it was written: plain values, and where each key stands. YAML, TOML, JSON and Python mappings end here alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ullage.errors import InvalidInput, UllageError
from ullage.job.text import read_text
from ullage.job.yaml_tree import Path as KeyPath
from ullage.job.yaml_tree import parse_yaml
from ullage.textfile import parse_json

_EXAMPLE = "a mapping such as model: llama-3.1-8b, cluster: 8xH100-SXM-80GB"


FindLines = Callable[[], dict[KeyPath, int]]


class Document:
    """``values``: the job as plain dicts, lists and scalars. ``places`` overrides the line, for keys set from the shell.

    ``find_lines`` is called only when an error needs a place.
    """

    __slots__ = ("base_dir", "find_lines", "name", "places", "values")

    def __init__(self, values: dict[str, object], path: Path | None = None, find_lines: FindLines = dict) -> None:
        self.values = values
        self.name = None if path is None else str(path)
        self.base_dir = Path() if path is None else path.parent
        self.find_lines = find_lines
        self.places: dict[str, str] = {}

    def place(self, key: str | None) -> str | None:
        """Where ``key`` (dotted) or its nearest written ancestor stands: ``job.yaml, line 9``."""
        path = tuple(key.split(".")) if key else ()
        lines = self.find_lines()
        for length in range(len(path), 0, -1):
            if (dotted := ".".join(path[:length])) in self.places:
                return self.places[dotted]
            if self.name and path[:length] in lines:
                return f"{self.name}, line {lines[path[:length]]}"
        return self.name


def read_document(source: str | Path | Mapping[str, object]) -> Document:
    """A file (by its suffix; without one, by its content) or a mapping in job.md's shape."""
    if isinstance(source, Mapping):
        return Document(_plain(source, 0))
    return parse_document(read_text(Path(source)), Path(source))


def parse_document(text: str, path: Path) -> Document:
    """The text of the file at ``path``, which is not read again."""
    suffix = path.suffix.lower()
    if suffix == ".json" or (suffix not in (".yaml", ".yml", ".toml") and text.lstrip().startswith("{")):
        values, find_lines = _json(text, str(path))
    elif suffix == ".toml":
        values, find_lines = _toml(text, str(path))
    else:
        values, lines = parse_yaml(text, str(path))
        find_lines = lambda: lines  # noqa: E731
    if values is None:
        raise InvalidInput("is empty", allowed=_EXAMPLE, place=str(path))
    if not isinstance(values, dict):
        raise InvalidInput(f"holds {_kind(values)} at the top", allowed=_EXAMPLE, place=str(path))
    return Document(_beside(values, path), path, find_lines)


def _beside(values: dict[str, object], path: Path) -> dict[str, object]:
    """A calibration file that a job names is relative to the job's file, wherever its values are read on."""
    cluster = values.get("cluster")
    device = cluster.get("device") if isinstance(cluster, dict) else None
    if isinstance(cluster, dict) and isinstance(device, str) and device.endswith(".toml"):
        return {**values, "cluster": {**cluster, "device": str(path.parent / Path(device).expanduser())}}
    return values


def _json(text: str, place: str) -> tuple[object, FindLines]:
    if not text.strip():
        return None, dict
    try:
        value = parse_json(
            text, place, remedy="correct it there", too_deep="no job needs that", parse_constant=_no_constant
        )
        value = _plain(value, 0) if isinstance(value, dict) else value
    except InvalidInput as error:
        raise error.at(place) from None
    except ValueError as error:  # a number of more than 4,300 digits
        raise InvalidInput(f"is no valid JSON: {error}", place=place) from None

    def find_lines() -> dict[KeyPath, int]:
        try:
            return parse_yaml(text, place)[1]  # nearly every JSON text is YAML: good enough for a line number
        except UllageError:
            return {}

    return value, find_lines


def _no_constant(name: str) -> object:
    raise InvalidInput(f"holds {name}", allowed="finite numbers")


def _toml(text: str, place: str) -> tuple[object, FindLines]:
    import tomllib

    if not text.strip():
        return None, dict
    try:
        value = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        what = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"is no valid TOML: {what}", remedy="correct it there", place=place) from None
    return _plain(value, 0), lambda: _toml_lines(text)


def _toml_lines(text: str) -> dict[KeyPath, int]:
    """Tables and bare keys, which is how jobs are written; a key inside an inline table has the line of that table."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.\-]+)\]", line):
            table = tuple(header[1].split("."))
            lines.setdefault(table, number)
        elif assignment := re.match(r"\s*([\w.\-]+)\s*=", line):
            lines.setdefault((*table, *assignment[1].split(".")), number)
    return lines


def _plain(value: Mapping[str, object], depth: int) -> dict[str, object]:
    return {str(key): _plain_value(item, depth + 1) for key, item in value.items()}


def _plain_value(value: object, depth: int) -> object:
    if depth > 32:
        raise InvalidInput("is nested deeper than 32 levels", remedy="no job needs that")
    if isinstance(value, Mapping):
        return _plain(value, depth)
    if isinstance(value, list | tuple):
        return [_plain_value(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "isoformat"):  # TOML reads 2025-02-24 as a date; here it is a version's name
        return str(value.isoformat())
    raise InvalidInput(f"holds a {type(value).__name__}", allowed="mappings, lists, texts, numbers, true, false, null")


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else f"only {value!r:.40}"
