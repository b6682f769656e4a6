"""JSON as people write it: comments and trailing commas are read (and complained of), and an edit keeps every other character.

DeepSpeed reads its file as Hjson and takes both; transformers and Accelerate read strict JSON and stop at them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from ullage.errors import InvalidInput
from ullage.formats.tree import DEEPEST, Leaves, Path, Tree, nested

_TOKEN = re.compile(
    r"""(?P<space>\s+)|(?P<comment>//[^\n]*|\#[^\n]*|/\*.*?\*/)|(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<mark>[{}\[\]:,])|(?P<word>[^\s{}\[\]:,"\#/]+)""",
    re.VERBOSE | re.DOTALL,
)
_INDENT = 2
_LONGEST_NUMBER = 400


class _Token(NamedTuple):
    kind: str  # text, mark, word or end
    text: str
    start: int
    end: int


class _Member(NamedTuple):
    """A key with its value, as offsets into the text."""

    key_start: int
    value_start: int
    value_end: int


class _Object(NamedTuple):
    """Offsets of the braces; the members' paths in order."""

    start: int
    end: int
    members: list[Path]


class _Parsed:
    """One pass over the tokens: leaves, members and objects by path, complaints by line."""

    def __init__(self, text: str, place: str) -> None:
        self.text = text
        self.place = place
        self.complaints: list[tuple[int, str]] = []
        self.members: dict[Path, _Member] = {}
        self.objects: dict[Path, _Object] = {}
        self.leaves: dict[Path, object] = {}
        self._tokens = self._tokenised()
        self._at = 0
        if self._now.kind == "end":
            raise InvalidInput("is empty", place=place)
        if not self._is("{"):
            raise InvalidInput("holds no keys at the top", allowed='{"key": value, ...}', place=place)
        self._object((), 0)
        if self._now.kind != "end":
            raise self._wrong("something follows the closing brace")

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def _tokenised(self) -> list[_Token]:
        found: list[_Token] = []
        offset = 0
        while offset < len(self.text):
            match = _TOKEN.match(self.text, offset)
            if match is None:
                raise self._wrong(f"{self.text[offset]!r} is not expected", offset)
            if match.lastgroup == "comment":
                self.complaints.append((self.line(offset), "a comment"))
            elif match.lastgroup != "space":
                found.append(_Token(str(match.lastgroup), match[0], match.start(), match.end()))
            offset = match.end()
        return [*found, _Token("end", "", len(self.text), len(self.text))]

    @property
    def _now(self) -> _Token:
        return self._tokens[self._at]

    def _is(self, mark: str) -> bool:
        return self._now.kind == "mark" and self._now.text == mark

    def _wrong(self, what: str, offset: int | None = None) -> InvalidInput:
        offset = self._now.start if offset is None else offset
        ends = not self.text[offset:].strip()
        remedy = "the file ends too early; is it truncated?" if ends else "correct it there"
        return InvalidInput(f"is no valid JSON: {what}", remedy=remedy, place=f"{self.place}, line {self.line(offset)}")

    def _value(self, path: Path | None, depth: int) -> object:
        """path: None inside a list, which is one leaf."""
        if depth > DEEPEST:
            remedy = "no configuration needs that"
            raise InvalidInput(f"is nested deeper than {DEEPEST} levels", remedy=remedy, place=self.place)
        if self._is("{"):
            return self._object(path, depth)
        if self._is("["):
            return self._list(depth)
        token = self._now
        if token.kind not in ("text", "word"):
            raise self._wrong("a value is missing")
        try:
            if token.kind == "word" and (len(token.text) > _LONGEST_NUMBER or token.text in _NO_NUMBERS):
                raise ValueError
            value: object = json.loads(token.text, strict=False)
        except ValueError:
            raise self._wrong(f"{token.text[:40]} is no value") from None
        self._at += 1
        return value

    def _object(self, path: Path | None, depth: int) -> dict[str, object]:
        start = self._now.start
        self._at += 1
        values: dict[str, object] = {}
        members: list[Path] = []
        while not self._is("}"):
            key = self._now
            if key.kind != "text":
                raise self._wrong("a key in double quotes is missing")
            name = str(json.loads(key.text, strict=False))
            if name in values:
                place = f"{self.place}, line {self.line(key.start)}"
                raise InvalidInput("is written twice", key=name, remedy="keep one of the two", place=place)
            self._at += 1
            if not self._is(":"):
                raise self._wrong("':' is missing")
            self._at += 1
            value_start = self._now.start
            inner = None if path is None else (*path, name)
            values[name] = self._value(inner, depth + 1)
            if inner is not None:
                self.members[inner] = _Member(key.start, value_start, self._tokens[self._at - 1].end)
                members.append(inner)
                if not isinstance(values[name], dict) or not values[name]:
                    self.leaves[inner] = values[name]
            self._comma("}")
        if path is not None:
            self.objects[path] = _Object(start, self._now.end, members)
        self._at += 1
        return values

    def _list(self, depth: int) -> list[object]:
        self._at += 1
        items: list[object] = []
        while not self._is("]"):
            items.append(self._value(None, depth + 1))
            self._comma("]")
        self._at += 1
        return items

    def _comma(self, closing: str) -> None:
        if self._is(","):
            comma = self._now.start
            self._at += 1
            if self._is(closing):
                self.complaints.append((self.line(comma), "a trailing comma"))
        elif not self._is(closing):
            raise self._wrong("',' is missing")


_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")


def parse(text: str, place: str) -> Tree:
    """InvalidInput, with the line, for what is no JSON even so."""
    parsed = _Parsed(text, place)
    lines = {path: parsed.line(member.key_start) for path, member in parsed.members.items()}
    return Tree(leaves=parsed.leaves, lines=lines, complaints=tuple(parsed.complaints))


def render(leaves: Leaves, comments: tuple[str, ...] = ()) -> str:
    """Strict JSON; it has no place for comments."""
    return json.dumps(nested(leaves), indent=_INDENT) + "\n"


def put(text: str, path: Path, value: object) -> str:
    """The text with one leaf set: replaced where it stands, else added behind its siblings, its sections with it."""
    parsed = _Parsed(text, "")
    if path in parsed.members:
        member = parsed.members[path]
        return text[: member.value_start] + json.dumps(value) + text[member.value_end :]
    depth = next(length for length in range(len(path) - 1, -1, -1) if path[:length] in parsed.objects)
    section = parsed.objects[path[:depth]]
    addition: object = value
    for part in reversed(path[depth + 1 :]):
        addition = {part: addition}
    return _added(text, parsed, section, path[depth], addition)


def _added(text: str, parsed: _Parsed, section: _Object, name: str, value: object) -> str:
    if not section.members:
        return text[: section.start + 1] + f"{json.dumps(name)}: {json.dumps(value)}" + text[section.end - 1 :]
    first, last = parsed.members[section.members[0]], parsed.members[section.members[-1]]
    line_start = text.rfind("\n", 0, first.key_start) + 1
    indent = text[line_start : first.key_start]
    if indent.strip():  # the object stands on one line
        written, between = f"{json.dumps(name)}: {json.dumps(value)}", ", "
    else:
        body = json.dumps(value, indent=len(indent.expandtabs(4)) and _step(indent, len(section.members[0])))
        written = f"{json.dumps(name)}: " + body.replace("\n", "\n" + indent)
        between = ",\n" + indent
    return text[: last.value_end] + between + written + text[last.value_end :]


def _step(indent: str, depth: int) -> str:
    """One level of the author's indentation."""
    return indent[: len(indent) // depth] or " " * _INDENT


def drop(text: str, path: Path) -> str:
    """The text without a member, its comma and its line; unchanged where it does not stand in it."""
    parsed = _Parsed(text, "")
    if path not in parsed.members:
        return text
    siblings = parsed.objects[path[:-1]].members
    member, index = parsed.members[path], siblings.index(path)
    if len(siblings) == 1:
        start, end = member.key_start, member.value_end
    elif index + 1 < len(siblings):
        start, end = member.key_start, parsed.members[siblings[index + 1]].key_start
    else:
        start, end = parsed.members[siblings[index - 1]].value_end, member.value_end
    return text[:start] + text[end:]


def values(text: str, place: str) -> Mapping[str, object]:
    """The nested values of a text."""
    return nested(parse(text, place).leaves)
