"""Where a traced model is cut into blocks: before the first layer, each layer, what runs between two of them, after the last one.

A layer is a child of a ModuleList, or one of several children of a Sequential that have parts of their own; of nested ones the outermost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from ullage.trace.events import TracedOp

_MOST_VISITS = 4
"""Where layers take turns more often than this, they are no chain, and the model is one block."""


class Part(NamedTuple):
    """Ops [start, stop) of the forward. role: a block's (model/graph.py). module: a layer's qualified name, "" of the others."""

    role: str
    module: str
    start: int
    stop: int


def parts(modules: Sequence[tuple[str, str]], ops: Sequence[TracedOp]) -> list[Part]:
    layers = layer_modules(modules)
    visits: list[Part] = []
    for at, op in enumerate(ops):
        layer = _layer(op.module, layers)
        if layer and visits and visits[-1].module == layer:
            visits[-1] = visits[-1]._replace(stop=at + 1)
        elif layer:
            visits.append(Part("layer", layer, at, at + 1))
    if len(visits) < 2 or len(visits) > _MOST_VISITS * len({visit.module for visit in visits}):
        return [Part("embedding", "", 0, len(ops))]
    end = max(at for at, op in enumerate(ops) if op.called) + 1
    found = [Part("embedding", "", 0, visits[0].start)]
    for visit, following in pairwise(visits):
        found += [visit, Part("between", "", visit.stop, following.start)]
    found += [visits[-1], Part("head", "", visits[-1].stop, end), Part("loss", "", end, len(ops))]
    return [part for part in found if part.start < part.stop]


def layer_modules(modules: Sequence[tuple[str, str]]) -> frozenset[str]:
    """The names of the outermost layers."""
    classes = dict(modules)
    parents = {name.rpartition(".")[0] for name in classes}
    composed = Counter(name.rpartition(".")[0] for name in parents if name)
    found: set[str] = set()
    for name in sorted(classes, key=lambda one: one.count(".")):
        parent, _, index = name.rpartition(".")
        if not index.isdigit() or any(name.startswith(f"{layer}.") for layer in found):
            continue
        kind = classes.get(parent, "")
        if kind == "ModuleList" or (kind == "Sequential" and name in parents and composed[parent] > 1):
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
