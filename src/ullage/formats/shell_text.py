"""Command-line arguments as people keep them: a script, a fragment of one, or YAML with an argument a line; edited in place.

A leaf's path is its flag: ("--num-layers",). Variables that the text itself sets are put in; others stay as written ($DATA_PATH).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ullage.errors import InvalidInput
from ullage.formats import yaml_text
from ullage.formats.known import published
from ullage.formats.tree import Leaves, Path, Tree
from ullage.job.yaml_tree import scalar

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"\n]*\"|'[^'\n]*'|[^\s;()]*)")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^}]*))?\})")
_FLAG = re.compile(r"--[A-Za-z][\w-]*")
_YAML_ARGUMENT = re.compile(r"^\s*(--)?[a-z][a-z0-9]*([-_][a-z0-9]+)+\s*:(\s|$)", re.M)
_DEEPEST_VARIABLE = 8
_INDENT = "    "


class _Word(NamedTuple):
    text: str
    start: int
    end: int
    quoted: bool


class _Argument(NamedTuple):
    """A flag and its values, as offsets: start..flag_end is the flag, values_start..end what it takes."""

    flag: str
    values: list[_Word]
    start: int
    flag_end: int

    @property
    def end(self) -> int:
        return self.values[-1].end if self.values else self.flag_end


Kinds = Mapping[str, str]


def kinds() -> Kinds:
    """flag -> value, words, maybe, flag or flag-off: how many values an argument takes."""
    arguments = published("megatron")["arguments"]
    assert isinstance(arguments, dict)
    return {flag: entry[0] for flag, entry in arguments.items()}


def parse(text: str, place: str, known: Kinds | None = None) -> Tree:
    """InvalidInput for a text without a single argument. known: the flags' kinds, where they are not Megatron's."""
    if known is None and _is_yaml(text):
        return _from_yaml(text, place)
    arguments = _arguments(text, known)
    if not arguments:
        raise InvalidInput("holds no arguments", allowed="--name value", place=place)
    variables = _variables(text)
    leaves: dict[Path, object] = {}
    for one in arguments:
        leaves[one.flag,] = _value(one, variables)
    lines: dict[Path, int] = {(one.flag,): text.count("\n", 0, one.start) + 1 for one in arguments}
    return Tree(leaves=leaves, lines=lines)


def _variables(text: str) -> dict[str, str]:
    """What the text sets itself; TP=${TP:-2} takes its default, for nobody set TP before."""
    found: dict[str, str] = {}
    for name, written in _ASSIGNMENT.findall(_without_comments(text)):
        own = re.fullmatch(rf"\$\{{{name}:?[-=]([^}}]*)\}}", written.strip("\"'"))
        found[name] = own[1] if own else written.strip("\"'")
    return found


def _is_yaml(text: str) -> bool:
    return _YAML_ARGUMENT.search(text) is not None and not re.search(
        r"^\s*[\w./]*(torchrun|python\d?|srun)\b", text, re.M
    )


def _from_yaml(text: str, place: str) -> Tree:
    tree = yaml_text.parse(text, place)
    leaves: dict[Path, object] = {(_flag_of(path[-1]),): value for path, value in tree.leaves.items()}
    lines: dict[Path, int] = {(_flag_of(path[-1]),): line for path, line in tree.lines.items()}
    return Tree(leaves=leaves, lines=lines)


def _flag_of(name: str) -> str:
    return name if name.startswith("--") or not re.fullmatch(r"[a-z][\w-]*", name) else f"--{name.replace('_', '-')}"


def _without_comments(text: str) -> str:
    """Comments as blanks, so that every offset stays."""
    return re.sub(r"(^|(?<=\s))#[^\n]*", lambda match: " " * len(match[0]), text)


def _words(text: str) -> list[_Word]:
    """The shell's words; quotes around several arguments are as good as none."""
    pattern = re.compile(r"\"([^\"]*)\"|'([^']*)'|\\\n|[^\s\"'\\]+|\\.")
    found: list[_Word] = []
    blank = _without_comments(text)
    offset = 0
    while match := pattern.search(blank, offset):
        whole, offset = match[0], match.end()
        if whole.startswith("\\"):
            continue
        if whole[0] in "\"'":
            inner = whole[1:-1]
            if re.search(r"(^|\s)--[A-Za-z]", inner):
                offset = match.start() + 1  # look inside
                blank = blank[: match.start()] + " " + inner + " " + blank[match.end() :]
                continue
            found.append(_Word(inner, match.start(), match.end(), True))
            continue
        start = match.start()
        stripped = whole.rstrip(";|&")
        opened = stripped.count("(") - stripped.count(")")
        if opened < 0 and stripped.endswith(")"):
            stripped = stripped[:-1]
        if stripped:
            found.append(_Word(stripped, start, start + len(stripped), False))
    return found


def _arguments(text: str, known: Kinds | None = None) -> list[_Argument]:
    known = kinds() if known is None else known
    found: list[_Argument] = []
    words = _words(text)
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        bare = re.sub(r"^(?:export\s+)?[A-Za-z_]\w*\+?=\(?", "", word.text)
        shift = len(word.text) - len(bare)
        flag, equals, value = bare.partition("=")
        if word.quoted or not _FLAG.fullmatch(flag):
            continue
        start = word.start + shift
        if equals:
            at = start + len(flag) + 1
            found.append(_Argument(flag, [_Word(value, at, word.end, False)], start, start + len(flag)))
            continue
        kind = known.get(flag, known.get(flag.replace("_", "-"), "guess"))
        values: list[_Word] = []
        most = {"flag": 0, "flag-off": 0, "value": 1, "maybe": 1, "guess": 1}.get(kind, 1000)
        while len(values) < most and index < len(words) and _is_value(words[index], text, word, kind):
            values.append(words[index])
            index += 1
        found.append(_Argument(flag, values, start, word.end))
    return found


def _is_value(word: _Word, text: str, flag: _Word, kind: str) -> bool:
    if not word.quoted and (_FLAG.match(word.text) or re.match(r"\$\{\w+\[", word.text)):
        return False
    between = text[flag.end : word.start].replace("\\\n", "")
    ends_line = "\n" in between
    return not ends_line or kind == "value"


def _value(one: _Argument, variables: Mapping[str, str]) -> object:
    if not one.values:
        return True
    found = [_resolved(word, variables) for word in one.values]
    return found[0] if len(found) == 1 else found


def _resolved(word: _Word, variables: Mapping[str, str]) -> object:
    text = word.text
    for _ in range(_DEEPEST_VARIABLE):
        replaced = _VARIABLE.sub(_of(variables), text)
        if replaced == text:
            break
        text = replaced[:1000]
    return scalar(text)


def _of(variables: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        found = variables.get(name)
        if found is None or name in found:
            found = match[3] if match[3] is not None else None
        return match[0] if found is None else found

    return value


def render(leaves: Leaves, comments: tuple[str, ...] = ()) -> str:
    """A bash array, one argument a line."""
    head = "".join(f"# {line}\n" for line in comments)
    lines = "".join(f"{_INDENT}{_written(path[0], value)}\n" for path, value in leaves.items())
    return f"{head}MEGATRON_ARGS=(\n{lines})\n"


def arguments_of(leaves: Leaves) -> tuple[str, ...]:
    """Each argument with its values as one text for the shell."""
    return tuple(_written(path[0], value) for path, value in leaves.items())


def _written(flag: str, value: object) -> str:
    if value is True:
        return flag
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([flag, *(_quoted(item) for item in values)])


def _quoted(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    return text if re.fullmatch(r"[\w.,:/+-]+", text) else "'" + text + "'"


def put(text: str, path: Path, value: object, known: Kinds | None = None) -> str:
    """The text with one argument set: its value replaced, or the argument added before the first one."""
    if known is None and _is_yaml(text):
        return yaml_text.put(text, _yaml_path(text, path[0]), value)
    arguments = _arguments(text, known)
    one = next((one for one in reversed(arguments) if one.flag == path[0]), None)
    if one is not None:
        return text[: one.start] + _written(path[0], value) + text[one.end :]
    anchor = next((one for one in arguments if one.flag in (kinds() if known is None else known)), arguments[0])
    line_start = text.rfind("\n", 0, anchor.start) + 1
    indent = text[line_start : anchor.start]
    line_end = text.find("\n", anchor.start)
    between = " "
    if not indent.strip():
        continued = text[anchor.start : line_end if line_end >= 0 else len(text)].rstrip().endswith("\\")
        between = (" \\\n" if continued else "\n") + indent
    return text[: anchor.start] + _written(path[0], value) + between + text[anchor.start :]


def drop(text: str, path: Path, known: Kinds | None = None) -> str:
    """The text without an argument, and without its line where it stood alone on it."""
    if known is None and _is_yaml(text):
        return yaml_text.drop(text, _yaml_path(text, path[0]))
    one = next((one for one in _arguments(text, known) if one.flag == path[0]), None)
    if one is None:
        return text
    line_start = text.rfind("\n", 0, one.start) + 1
    line_end = text.find("\n", one.end)
    line_end = len(text) if line_end < 0 else line_end + 1
    rest = text[one.end : line_end].strip().rstrip("\\").strip()
    if not text[line_start : one.start].strip() and not rest:
        return drop_all(text[:line_start] + text[line_end:], path, known)
    end = one.end + len(text[one.end :]) - len(text[one.end :].lstrip(" "))
    return drop_all(text[: one.start] + text[end:], path, known)


def drop_all(text: str, path: Path, known: Kinds | None = None) -> str:
    """An argument may stand in a text more than once: the last one counts."""
    return drop(text, path, known) if any(one.flag == path[0] for one in _arguments(text, known)) else text


def _yaml_path(text: str, flag: str) -> Path:
    tree = yaml_text.parse(text, "")
    for path in tree.leaves:
        if _flag_of(path[-1]) == flag:
            return path
    section = next((path[:-1] for path in tree.leaves if _flag_of(path[-1]) in kinds()), ())
    dashed = any(path[-1].startswith("--") for path in tree.leaves)
    return (*section, flag if dashed else flag.removeprefix("--"))
