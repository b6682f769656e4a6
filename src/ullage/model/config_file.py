"""A config.json as plain keys: read with limits, so that a wrong path is one clear message and never a full memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ullage.errors import InvalidInput
from ullage.frozen import FrozenMap
from ullage.textfile import parse_json, read_start
from ullage.units import MIB, format_bytes

LONGEST_FILE_BYTES: Final = 4 * MIB  # a classifier's labels make the longest ones
DEEPEST_NESTING: Final = 16
_REMEDY: Final = "give the path of a model's config.json"


def read_config(path: Path) -> tuple[FrozenMap, str]:
    """The keys of a config.json, or of the one in a folder, and the path that was read."""
    if _is_folder(path):
        path = path / "config.json"
    place = str(path)
    text = _text(path, place)
    if not text.strip():
        raise InvalidInput("is empty", remedy=_REMEDY, place=place)
    try:
        value = parse_json(text, place, remedy=_REMEDY, too_deep=_REMEDY)
    except ValueError:  # a number of more than 4,300 digits
        raise InvalidInput("holds a number that is too long", remedy=_REMEDY, place=place) from None
    if not isinstance(value, dict):
        raise InvalidInput(
            f"holds {_kind(value)}, not keys", allowed='{"model_type": ...}', remedy=_REMEDY, place=place
        )
    try:
        return plain_keys(value), place
    except InvalidInput as error:
        raise error.at(place) from None


def plain_keys(keys: Mapping[str, object]) -> FrozenMap:
    """The keys, frozen; InvalidInput for what no JSON holds or what is nested too deep."""
    _plain(keys, "model", 0)
    return FrozenMap(keys)


def _plain(value: object, key: str, depth: int) -> None:
    if depth > DEEPEST_NESTING:
        raise InvalidInput(f"is nested deeper than {DEEPEST_NESTING} levels", key=key[:80])
    if isinstance(value, Mapping):
        for name, item in value.items():
            _plain(item, f"{key}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _plain(item, key, depth + 1)
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise InvalidInput(
            f"is a {type(value).__name__}",
            key=key[:80],
            allowed="a text, a number, true, false, null, a list or a mapping",
        )


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder; not one, where a folder above it may not be entered: reading it then says so."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _text(path: Path, place: str) -> str:
    in_folder = path.name == "config.json" and _is_folder(path.parent)
    missing = "the folder holds no config.json" if in_folder else "there is no such file"
    try:
        raw = read_start(path, LONGEST_FILE_BYTES, remedy=_REMEDY, missing=missing)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(f"cannot be read: {reason}", remedy=_REMEDY, place=place[:200]) from None
    if len(raw) > LONGEST_FILE_BYTES:
        raise InvalidInput(
            f"is longer than {format_bytes(LONGEST_FILE_BYTES)}: no config.json", remedy=_REMEDY, place=place
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"is no text (byte {error.start} is no UTF-8)", remedy=_REMEDY, place=place) from None
    if "\0" in text:
        raise InvalidInput("is a binary file", remedy=_REMEDY, place=place)
    return text


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return f"only {str(value)[:40]!r}"
