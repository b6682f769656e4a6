"""Where a traced model is cut into blocks: before the first layer, each layer, after the last one.

A layer is a child of a ModuleList, or of a Sequential whose children have parts of their own; of nested ones the outermost. What runs
between two layers belongs to the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ullage.trace.events import TracedOp

_MOST_VISITS = 4
"""Where layers take turns more often than this, they are no chain, and the model is one block."""


class Part(NamedTuple):
    """Ops [start, stop) of the forward. module: the layer's qualified name, "" before the first and after the last."""

    role: str
    module: str
    start: int
    stop: int


def parts(modules: Sequence[tuple[str, str]], ops: Sequence[TracedOp]) -> list[Part]:
    layers = layer_modules(modules)
    visits: list[tuple[str, int]] = []  # layer, first op
    last = 0
    for at, op in enumerate(ops):
        layer = _layer(op.module, layers)
        if layer:
            last = at + 1
            if not visits or visits[-1][0] != layer:
                visits.append((layer, at))
    if len(visits) < 2 or len(visits) > _MOST_VISITS * len({layer for layer, _ in visits}):
        return [Part("embedding", "", 0, len(ops))]
    starts = [start for _, start in visits]
    found = [
        Part("layer", layer, start, stop) for (layer, start), stop in zip(visits, [*starts[1:], last], strict=True)
    ]
    before = [Part("embedding", "", 0, starts[0])] if starts[0] else []
    after = [Part("head", "", last, len(ops))] if last < len(ops) else []
    return [*before, *found, *after]


def layer_modules(modules: Sequence[tuple[str, str]]) -> frozenset[str]:
    """The names of the outermost layers."""
    classes = dict(modules)
    parents = {name.rpartition(".")[0] for name in classes}
    found: set[str] = set()
    for name in sorted(classes, key=lambda one: one.count(".")):
        parent, _, index = name.rpartition(".")
        if not index.isdigit() or any(name.startswith(f"{layer}.") for layer in found):
            continue
        kind = classes.get(parent, "")
        if kind == "ModuleList" or (kind == "Sequential" and name in parents):
            found.add(name)
    return frozenset(found)


def _layer(module: str, layers: frozenset[str]) -> str:
    """The layer that a module lies in, or ""."""
    name = module
    while name:
        if name in layers:
            return name
        name = name.rpartition(".")[0]
    return ""
