"""Typed readers of single values, and ``Section``: one mapping of the job, each key of which is taken once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ullage.errors import InvalidInput, UnknownKey, nearest
from ullage.units import parse_count

T = TypeVar("T")
Read = Callable[[object, str], T]

LARGEST_COUNT = 10**15
_LONGEST_SHOWN = 60


def show(value: object) -> str:
    """A value as a job file writes it, on one line, cut where it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_COUNT:
        text = str(int(value))
    else:
        text = str(value)
    text = text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"
    # line breaks and terminal codes of a hostile file do not belong in a message
    return text if text.isprintable() else repr(text)[1:-1]


def hint(name: object, known: Iterable[str]) -> str | None:
    """``did you mean tp?``, or None where nothing is near."""
    match = nearest(str(name), known)
    return f"did you mean {match}?" if match else None


def flag(value: object, key: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput("is neither true nor false", key=key, value=show(value), allowed="true or false")
    return value


def integer(least: int) -> Read[int]:
    """A count of at least ``least``; 5e8 is one."""

    def read(value: object, key: str) -> int:
        allowed = f"a whole number of at least {least}"
        try:
            count = parse_count(value, key)
        except InvalidInput:
            raise InvalidInput("is no such number", key=key, value=show(value), allowed=allowed) from None
        if not least <= count <= LARGEST_COUNT:
            what = "is too small" if count < least else "is too large"
            raise InvalidInput(what, key=key, value=show(value), allowed=allowed)
        return count

    return read


def number(least: float = 0.0, most: float = math.inf) -> Read[float]:
    """A finite number in least..most; in a text too, since YAML 1.1 writers quote 1e-4."""
    allowed = (
        "a number" + (f" from {least:g}" if least > -math.inf else "") + (f" to {most:g}" if most < math.inf else "")
    )

    def read(value: object, key: str) -> float:
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            found = float(value)
        except (ValueError, OverflowError):
            raise InvalidInput("is no number", key=key, value=show(value), allowed=allowed) from None
        if not (least <= found <= most and math.isfinite(found)):
            raise InvalidInput("is out of range", key=key, value=show(value), allowed=allowed)
        return found

    return read


def text(value: object, key: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput("is no text", key=key, value=show(value), allowed="a text; write it in quotes")
    return value


def texts(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise InvalidInput("is no list of texts", key=key, value=show(value), allowed="[a, b, ...]")
    return tuple(value)


def integers(least: int) -> Read[tuple[int, ...]]:
    one = integer(least)

    def read(value: object, key: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not value:
            raise InvalidInput("is no list of numbers", key=key, value=show(value), allowed="[4, 4, ...]")
        return tuple(one(item, f"{key}.{index}") for index, item in enumerate(value))

    return read


def choice(*allowed: str, aliases: Mapping[str, str] | None = None) -> Read[str]:
    """One of ``allowed``; another spelling in ``aliases`` is read as what it stands for."""

    def read(value: object, key: str) -> str:
        if isinstance(value, str):
            name = (aliases or {}).get(value, value)
            if name in allowed:
                return name
        raise InvalidInput(
            "is not known", key=key, value=show(value), allowed=", ".join(allowed), remedy=hint(value, allowed)
        )

    return read


def optional(read: Read[T]) -> Read[T | None]:
    return lambda value, key: None if value is None else read(value, key)


class Section:
    """A mapping at ``path``; ``defaults`` collects ``key = value`` for each key that was left out, for the whole job."""

    __slots__ = ("defaults", "known", "path", "values")

    def __init__(self, values: Mapping[str, object], path: str, defaults: list[str]) -> None:
        self.values = values
        self.path = path
        self.defaults = defaults
        self.known: list[str] = []

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def written(self, name: str) -> bool:
        return name in self.values

    def take(self, name: str, read: Read[T], default: T) -> T:
        """The value of ``name``, or ``default``, which is then listed."""
        self.known.append(name)
        if name in self.values:
            return read(self.values[name], self.key(name))
        self.note(name, default)
        return default

    def note(self, name: str, default: object, why: str = "") -> None:
        self.defaults.append(f"{self.key(name)} = {show(default)}" + (f" ({why})" if why else ""))

    def raw(self, name: str) -> object:
        """The value as written (None where left out), for a reader of its own."""
        self.known.append(name)
        return self.values.get(name)

    def inner(self, name: str) -> Section:
        """The mapping under ``name``; an empty one where it is left out, or where all its lines are comments."""
        self.known.append(name)
        value = self.values.get(name)
        if value is None:
            value = {}
        return Section(as_mapping(value, self.key(name)), self.key(name), self.defaults)

    def close(self) -> None:
        """UnknownKey for the first key that nobody took."""
        for name in self.values:
            if name not in self.known:
                known = sorted(set(self.known))
                raise UnknownKey(
                    "is not a key of a job" if not self.path else f"is not a key of {self.path}",
                    key=self.key(show(name)),
                    value=show(self.values[name]),
                    allowed=", ".join(known),
                    remedy=hint(name, known),
                )


def as_mapping(value: object, key: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        remedy = f"write {key}: {{name: {value}}}" if key == "engine" and isinstance(value, str) else None
        raise InvalidInput("is no mapping", key=key, value=show(value), allowed="keys and their values", remedy=remedy)
    return value
