"""What stage 3 holds gathered during each block of a forward and a backward, as the replayed coordinator says (coordinator.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike
from functools import lru_cache

from ullage.engines.base import sized
from ullage.engines.deepspeed.coordinator import Coordinator, Hooks, Level, Limits
from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import PLAIN, Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.memory.rank import LocalParam, Rank
from ullage.model.graph import Block, Op

_TREES_OF_MODULES = frozenset({"transformers", "liger", "unsloth"})
"""Stacks whose activation functions and whose model inside the model are modules too."""


def is_persistent(numel: int, knobs: Knobs) -> bool:
    return numel <= knobs.persistence_threshold


def persistent_numel(held: Held, knobs: Knobs) -> int:
    """Elements that stay whole: small parameters, in model order, as long as model_persistence_threshold lasts."""
    total = 0
    for numel in held.numels:
        if is_persistent(numel, knobs) and total + numel <= knobs.model_persistence_threshold:
            total += numel
    return total


@frozen
class Gathers:
    """levels: what is gathered during each block's forward, in model order, and then during each one's backward."""

    job: Job
    elements: tuple[Element, ...]
    levels: tuple[Level, ...]

    @staticmethod
    def plan(job: Job, rank: Rank, knobs: Knobs, elements: ListLike[Element]) -> Gathers:
        return Gathers(job=job, elements=tuple(elements), levels=_levels(job, rank, knobs, tuple(elements)))

    def forward(self, replayer: Replayer) -> Node:
        rule = GradRule(mode="add")
        return Sequence(
            [
                self._during(use, element, chunks.forward([element], replayer, Wrap(), rule))
                for use, element in enumerate(self.elements)
            ]
        )

    def backward(self, backwards: Iterable[Node]) -> Node:
        """backwards: of the elements, last first."""
        uses = range(len(self.elements), 2 * len(self.elements))
        return Sequence(
            [
                self._during(use, element, node)
                for use, element, node in zip(uses, reversed(self.elements), backwards, strict=True)
            ]
        )

    def _during(self, use: int, element: Element, inner: Node) -> Node:
        level = self.levels[use]
        if not level.peak:
            return inner
        whole = _gathered(element.block.name, level.whole, self.job.precision.params)
        flat = _flat(level.peak - level.whole, self.job.precision.params)
        return Sequence([alloc(whole), alloc(flat), free(flat), inner, free(whole)])


@lru_cache(maxsize=1024)
def _gathered(name: str, numel: int, dtype: str) -> Item:
    why = "whole or on their way"
    return sized("gathered", f"parameters gathered around {name}", numel, dtype, why=why, lives="fetch to release")


@lru_cache(maxsize=1024)
def _flat(numel: int, dtype: str) -> Item:
    why = "of several parameters, beside the copies out of it"
    return sized(
        "gathered", "flat buffer of a gather", numel, dtype, why=why, lives="until the last has been waited for"
    )


@lru_cache(maxsize=256)
def _levels(job: Job, rank: Rank, knobs: Knobs, elements: tuple[Element, ...]) -> tuple[Level, ...]:
    tree = _Tree(job, rank, elements)
    small = frozenset(place for place, numel in enumerate(tree.numels) if is_persistent(numel, knobs))
    limits = Limits(
        prefetch=knobs.prefetch_bucket, max_live=knobs.max_live, max_reuse_distance=knobs.max_reuse_distance
    )
    found = Coordinator(tuple(tree.numels), small, tree.hooks, limits).levels()
    missing = 2 * len(elements) - len(found)  # the last blocks of the backward have no module
    return (*found, *[Level(whole=0, peak=0)] * missing)


class _Tree:
    """The modules whose hooks run in a forward and a backward, in that order, with the parameters that are their own.

    A transformers model calls a model inside, and that a rotary embedding after the word embedding's; a layer calls an attention and
    an MLP, and that an activation. None of these has parameters of its own.
    """

    def __init__(self, job: Job, rank: Rank, elements: tuple[Element, ...]) -> None:
        self.numels: list[int] = []
        self.hooks: list[Hooks] = []
        self.deep = job.stack in _TREES_OF_MODULES
        local = {param.name: param for param in rank.params}
        modules = [list(self._modules(element, local)) for element in elements]
        for visit, element in enumerate(elements):
            self._forward(visit, element, modules[visit])
        for visit, element in enumerate(reversed(elements), start=len(elements)):
            self._backward(visit, element, modules[2 * len(elements) - 1 - visit])

    def _modules(self, element: Element, local: dict[str, LocalParam]) -> Iterator[tuple[int, ...]]:
        for _ in range(element.size):
            for op, opens in _calls(element.block, self.deep):
                yield from [()] * opens
                mine = [local.get(f"{element.block.name}.{param.name}") for param in op.params if not param.buffer]
                places = []
                for param in mine:
                    if param is not None:
                        places.append(len(self.numels))
                        self.numels.append(param.numel)
                yield tuple(places)

    def _forward(self, visit: int, element: Element, modules: list[tuple[int, ...]]) -> None:
        first = element.block.role == "embedding"
        outer = (2 if self.deep else 1) * first
        hooks = [*[()] * outer, *modules, *([()] if first and self.deep else [])]
        self.hooks += [Hooks(params=params, visit=visit) for params in hooks]

    def _backward(self, visit: int, element: Element, modules: list[tuple[int, ...]]) -> None:
        if element.mode != PLAIN:
            self._forward(visit, element, modules)  # runs again
        outer = (2 if self.deep else 1) * (element.block.role == "head")
        # The word embedding's inputs are integers: its backward is never seen to end.
        releases = element.block.role != "embedding"
        hooks = [*[()] * outer, *reversed(modules)]
        self.hooks += [Hooks(params=params, visit=visit, releases=releases) for params in hooks]


def _calls(block: Block, deep: bool) -> Iterator[tuple[Op, int]]:
    """Every op that is a module of its own, with how many modules are entered just before it that only hold others."""
    layer = any(op.kind == "attention" for op in block.ops)
    seen_attention = entered_attention = entered_mlp = False
    after = 0
    opens = int(layer)
    for op in block.ops:
        seen_attention = seen_attention or op.kind == "attention"
        if op.kind == "activation" and deep:
            yield op, opens
            opens = 0
            continue
        if not op.params:
            continue
        if layer and op.kind != "norm":
            after += seen_attention
            if not entered_attention:
                opens, entered_attention = opens + 1, True
            elif after == 2 and not entered_mlp:  # the first after the attention is its own output
                opens, entered_mlp = opens + 1, True
        yield op, opens
        opens = 0
