"""YAML as text: leaves with their lines, and edits of one leaf that keep comments, order and quoting of all the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from ullage.errors import InvalidInput
from ullage.formats.tree import Leaves, Path, Tree, flat, nested
from ullage.job.yaml_tree import parse_yaml

_INDENT = "  "
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def parse(text: str, place: str) -> Tree:
    """InvalidInput for what is no YAML (a tab as indentation among it), with the line."""
    values, lines = parse_yaml(text, place)
    if values is None:
        raise InvalidInput("is empty", place=place)
    if not isinstance(values, dict):
        raise InvalidInput("holds no keys at the top", allowed="key: value", place=place)
    return Tree(leaves=flat(values, place), lines=dict(lines))


def render(leaves: Leaves, comments: tuple[str, ...] = ()) -> str:
    head = "".join(f"# {line}\n" for line in comments)
    return head + _block(nested(leaves), "")


def block(values: Mapping[str, object]) -> str:
    """Any values as YAML: mappings in lists too, which configurations of engines do not have."""
    return yaml.safe_dump(dict(values), sort_keys=False, width=100)


def _block(values: Mapping[str, object], indent: str) -> str:
    lines = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{scalar(key)}:\n{_block(value, indent + _INDENT)}")
        else:
            lines.append(f"{indent}{scalar(key)}: {scalar(value)}\n")
    return "".join(lines)


def scalar(value: object) -> str:
    """A value on one line; a text that YAML would take for something else stands in quotes."""
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain else json.dumps(value)
    if isinstance(value, float):
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")
    return json.dumps(value, default=list)


def put(text: str, path: Path, value: object) -> str:
    """The text with one leaf set: replaced where it stands, else added behind its siblings, its sections with it."""
    root = _compose(text)
    node, depth = _deepest(root, path)
    if depth == len(path):
        start, end = node.start_mark.index, _end(text, node)
        return text[:start] + scalar(value) + text[end:]
    addition: object = value
    for part in reversed(path[depth + 1 :]):
        addition = {part: addition}
    return _added(text, node, path[depth], addition)


def _added(text: str, node: Node, name: str, value: object) -> str:
    if not isinstance(node, MappingNode) or not node.value:
        start, end = node.start_mark.index, _end(text, node)
        indent = " " * (node.start_mark.column and _column(text, start)) + _INDENT
        return text[:start].rstrip(" ") + "\n" + _block({name: value}, indent).rstrip("\n") + text[end:]
    if node.flow_style:
        last = node.value[-1][1]
        end = _end(text, last)
        return text[:end] + f", {scalar(name)}: {scalar(value)}" + text[end:]
    last = node.value[-1][1]
    end = _end(text, last)
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end + 1
    head = text[:line_end] if text[:line_end].endswith("\n") else text[:line_end] + "\n"
    return head + _block({name: value}, " " * node.start_mark.column) + text[line_end:]


def _column(text: str, offset: int) -> int:
    """Where the line of an offset begins to say something."""
    line = text[text.rfind("\n", 0, offset) + 1 : offset]
    return len(line) - len(line.lstrip())


def drop(text: str, path: Path) -> str:
    """The text without the lines of a leaf, or without its pair in a flow mapping; unchanged where it does not stand in it."""
    root = _compose(text)
    node, depth = _deepest(root, path[:-1])
    if depth < len(path) - 1 or not isinstance(node, MappingNode):
        return text
    pairs = node.value
    index = next((at for at, (key, _) in enumerate(pairs) if key.value == path[-1]), None)
    if index is None:
        return text
    key, value = pairs[index]
    if node.flow_style:
        start = _end(text, pairs[index - 1][1]) if index else key.start_mark.index
        end = _end(text, value) if index or len(pairs) == 1 else pairs[1][0].start_mark.index
        return text[:start] + text[end:]
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    line_end = text.find("\n", _end(text, value))
    return text[:start] + ("" if line_end < 0 else text[line_end + 1 :])


def _compose(text: str) -> Node:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert node is not None  # it was parsed before
    return node


def _deepest(root: Node, path: Path) -> tuple[Node, int]:
    """The node of ``path``, or of its longest part that stands in the text, and the length of that part."""
    node, depth = root, 0
    for part in path:
        if not isinstance(node, MappingNode):
            break
        found = next((value for key, value in node.value if key.value == part), None)
        if found is None:
            break
        node, depth = found, depth + 1
    return node, depth


def _end(text: str, node: Node) -> int:
    """Where a value ends: PyYAML has a block collection end at the next token, blank lines and comments later."""
    if isinstance(node, ScalarNode) or getattr(node, "flow_style", False):
        return int(node.end_mark.index)
    if isinstance(node, MappingNode) and node.value:
        return _end(text, node.value[-1][1])
    items = getattr(node, "value", None)
    return _end(text, items[-1]) if items else int(node.end_mark.index)
