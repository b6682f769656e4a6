"""YAML to plain values and the line of each key, from the parser's events.

Not ``yaml.safe_load``, for four reasons: it forgets lines; it keeps the last of two equal keys; it follows YAML 1.1, where
``5e8`` is a text, ``no`` is false and ``2025-02-24`` is a date; and its aliases may expand without limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from ullage.errors import InvalidInput

Path = tuple[str, ...]

DEEPEST_NESTING = 32
MOST_NODES = 20_000  # aliases counted as if they were written out
LONGEST_NUMBER = 64

# Keys whose value is a name even where it looks like a number: 4.40 is not 4.4.
TEXT_PATHS: frozenset[Path] = frozenset({("stack_version",)})

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_BASED_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


def parse_yaml(text: str, place: str | None) -> tuple[object, dict[Path, int]]:
    """The document's value, and the line (from 1) of each key in it. InvalidInput if it is not one small YAML document."""
    import yaml  # not at the top: a TOML or JSON job needs no YAML

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Builder(iter(yaml.parse(text, Loader=loader)), place).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InvalidInput(
            f"is no valid YAML: {problem}", remedy="close or indent what is open there", place=_at(place, mark)
        ) from None


def scalar(text: str) -> object:
    """A plain scalar by YAML 1.2's core schema: null, true, 8, 0x10, 5e8, or else the text itself."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) <= LONGEST_NUMBER:
        if _INT.fullmatch(text):
            return int(text)
        if _BASED_INT.fullmatch(text):
            return int(text, 0)
        if _FLOAT.fullmatch(text):
            return float(text)
    return text


class _Builder:
    """Recursive descent over the events; recursion is bounded by DEEPEST_NESTING, work by MOST_NODES."""

    __slots__ = ("anchors", "events", "lines", "nodes", "place")

    def __init__(self, events: Iterator[Any], place: str | None) -> None:
        self.events = events
        self.place = place
        self.lines: dict[Path, int] = {}
        self.anchors: dict[str, tuple[object, int]] = {}  # value and its number of nodes
        self.nodes = 0

    def document(self) -> tuple[object, dict[Path, int]]:
        value: object = None
        documents = 0
        for event in self.events:
            match type(event).__name__:
                case "DocumentStartEvent":
                    documents += 1
                    if documents > 1:
                        self._fail(event, "holds a second document", "keep one job in one file")
                    value = self._node(next(self.events), ())
        return value, self.lines

    def _node(self, event: Any, path: Path) -> object:
        if len(path) > DEEPEST_NESTING:
            self._fail(event, f"is nested deeper than {DEEPEST_NESTING} levels", "no job needs that")
        kind = type(event).__name__
        if kind == "AliasEvent":
            return self._alias(event)
        if event.tag is not None and event.tag != "!":
            self._fail(event, f"holds the tag {event.tag}", "tags are not read; write the plain value")
        before = self.nodes
        self._count(event, 1)
        match kind:
            case "ScalarEvent":
                as_name = path in TEXT_PATHS and event.value not in _NULL
                value = scalar(event.value) if event.implicit[0] and not as_name else event.value
            case "SequenceStartEvent":
                value = self._sequence(path)
            case _:
                value = self._mapping(path)
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, self.nodes - before)
        return value

    def _alias(self, event: Any) -> object:
        if event.anchor not in self.anchors:
            self._fail(event, f"the alias *{event.anchor} names no finished anchor", "write the value out")
        value, nodes = self.anchors[event.anchor]
        self._count(event, nodes)
        return value

    def _sequence(self, path: Path) -> list[object]:
        items: list[object] = []
        while type(event := next(self.events)).__name__ != "SequenceEndEvent":
            child = (*path, str(len(items)))
            self.lines[child] = event.start_mark.line + 1
            items.append(self._node(event, child))
        return items

    def _mapping(self, path: Path) -> dict[str, object]:
        keys: dict[str, object] = {}
        while type(event := next(self.events)).__name__ != "MappingEndEvent":
            if type(event).__name__ != "ScalarEvent":
                self._fail(event, "a key must be a plain word", "write key: value")
            key, child = event.value, (*path, event.value)
            if key in keys:
                raise InvalidInput(
                    f"is written twice, the first time in line {self.lines[child]}",
                    key=".".join(child),
                    remedy="keep one of the two",
                    place=_at(self.place, event.start_mark),
                )
            self.lines[child] = event.start_mark.line + 1
            keys[key] = self._node(next(self.events), child)
        return keys

    def _count(self, event: Any, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MOST_NODES:
            self._fail(event, f"holds more than {MOST_NODES} values, aliases written out", "no job needs that many")

    def _fail(self, event: Any, what: str, remedy: str) -> NoReturn:
        raise InvalidInput(what, remedy=remedy, place=_at(self.place, event.start_mark))


def _at(place: str | None, mark: Any) -> str | None:
    if mark is None:
        return place
    line = f"line {mark.line + 1}"
    return f"{place}, {line}" if place else line
