"""TOML as text: leaves with their lines, and edits of one leaf that keep comments, order and quoting of all the rest."""

from __future__ import annotations

import json
import re
import tomllib

from ullage.errors import InvalidInput
from ullage.formats.tree import Leaves, Path, Tree, flat

_HEADER = re.compile(r"\s*\[\s*([\w.\-\s\"']+?)\s*\]\s*(#.*)?$")
_PAIR = re.compile(r"(\s*)([\w.\-\"']+)\s*=\s*")
_VALUE = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|\[[^\]\n#]*\]|\{[^}\n#]*\}|[^#\n]*?(?=\s*(?:#|$))", re.M)


def parse(text: str, place: str) -> Tree:
    """InvalidInput for what is no TOML, with the line."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        what = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"is no valid TOML: {what}", remedy="correct it there", place=place) from None
    leaves = {path: _plain(value) for path, value in flat(values, place).items()}
    return Tree(leaves=leaves, lines={path: number for path, (number, _) in _lines(text).items()})


def _plain(value: object) -> object:
    """Dates are texts here."""
    return value.isoformat() if hasattr(value, "isoformat") else value


def _lines(text: str) -> dict[Path, tuple[int, re.Match[str]]]:
    """path -> its line, from 1, and the match of ``key =`` on it."""
    found: dict[Path, tuple[int, re.Match[str]]] = {}
    table: Path = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = _parts(header[1])
        elif pair := _PAIR.match(line):
            found.setdefault((*table, *_parts(pair[2])), (number, pair))
    return found


def _parts(name: str) -> Path:
    return tuple(part.strip().strip("\"'") for part in name.split("."))


def render(leaves: Leaves, comments: tuple[str, ...] = ()) -> str:
    """A table for each section, in the order of their first keys."""
    tables: dict[Path, list[str]] = {}
    for path, value in leaves.items():
        tables.setdefault(path[:-1], []).append(f"{_key(path[-1])} = {_written(value)}")
    blocks = ["".join(f"# {line}\n" for line in comments)]
    for table in sorted(tables, key=lambda table: len(table) > 0):
        head = f"[{'.'.join(map(_key, table))}]\n" if table else ""
        blocks.append(head + "".join(f"{line}\n" for line in tables[table]))
    return "\n".join(block for block in blocks if block)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w\-]+", name) else json.dumps(name)


def _written(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))} = {_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    if value is None:
        return '""'
    return repr(value) if isinstance(value, float) else json.dumps(value)


def put(text: str, path: Path, value: object) -> str:
    """The text with one leaf set: replaced where it stands, else added at the top of its table, or with a table of its own."""
    lines = text.splitlines(keepends=True)
    known = _lines(text)
    if path in known:
        number, pair = known[path]
        line = lines[number - 1]
        match = _VALUE.match(line, pair.end())
        end = match.end() if match else len(line.rstrip("\n"))
        lines[number - 1] = line[: pair.end()] + _written(value) + line[end:]
        return "".join(lines)
    written = f"{_key(path[-1])} = {_written(value)}\n"
    header = next(
        (
            at
            for at, line in enumerate(lines)
            if (found := _HEADER.match(line.rstrip("\n"))) and _parts(found[1]) == path[:-1]
        ),
        None,
    )
    if header is None and len(path) > 1:
        gap = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
        return f"{text}{gap}[{'.'.join(map(_key, path[:-1]))}]\n{written}"
    at = 0 if header is None else _last_of_table(lines, header)
    if at and not lines[at - 1].endswith("\n"):
        lines[at - 1] += "\n"
    lines.insert(at, written)
    return "".join(lines)


def _last_of_table(lines: list[str], header: int) -> int:
    """Behind the last pair of a table, before the blank lines that follow."""
    last = header
    for at in range(header + 1, len(lines)):
        if _HEADER.match(lines[at].rstrip("\n")):
            break
        if lines[at].strip() and not lines[at].lstrip().startswith("#"):
            last = at
    return last + 1


def drop(text: str, path: Path) -> str:
    """The text without the line of a leaf, or without a table; unchanged where it does not stand in it."""
    lines = text.splitlines(keepends=True)
    gone = {number - 1 for leaf, (number, _) in _lines(text).items() if leaf[: len(path)] == path}
    for at, line in enumerate(lines):
        found = _HEADER.match(line.rstrip("\n"))
        if found and _parts(found[1])[: len(path)] == path:
            gone.add(at)
    return "".join(line for at, line in enumerate(lines) if at not in gone)
