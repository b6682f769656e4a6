"""What stage 3 holds gathered during each block of a forward and a backward, as the replayed coordinator says (coordinator.py)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from functools import cache, lru_cache

from ullage.engines.base import sized
from ullage.engines.deepspeed.coordinator import Coordinator, Hooks, Level, Limits
from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held
from ullage.job.adapted import is_adapted
from ullage.job.job import Job
from ullage.job.saved_modules import ORIGINAL
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import PLAIN, Element, Replayer, Wrap
from ullage.memory.program import EMPTY, Item, Node, Sequence, alloc, free
from ullage.memory.rank import LocalParam, Rank
from ullage.model.graph import Block, Op

_TREES_OF_MODULES = frozenset({"transformers", "liger", "unsloth"})
"""Stacks whose activation functions and whose model inside the model are modules too."""


def is_persistent(numel: int, knobs: Knobs) -> bool:
    return numel <= knobs.persistence_threshold


def persistent_numel(held: Held, knobs: Knobs) -> int:
    """Elements that stay whole: small parameters, frozen ones too, as long as model_persistence_threshold lasts."""
    total = 0
    for numel in (*held.numels, *held.frozen_numels):
        if is_persistent(numel, knobs) and total + numel <= knobs.model_persistence_threshold:
            total += numel
    return total


class Gathers:
    """What is gathered during each block's forward, and in its backward during each module's: a gradient's hook is where the next
    module's begins.

    first: of a step's micro-batches. With hpZ a parameter's second shard is made where it is let go of for the first time in a step, and
    stays until the step's end (partition_parameters.py, _partition_param_sec; stage3.py, invalidate_secondary_tensor)."""

    def __init__(self, job: Job, rank: Rank, knobs: Knobs, elements: ListLike[Element], *, first: bool = False) -> None:
        self.dtype = job.precision.params
        self.shards = knobs.hpz if knobs.hpz > 1 and job.offload.params == "none" else None
        self.first = first and self.shards is not None
        self.elements = tuple(elements)
        self.tree = _tree(job.stack, job.lora is not None, rank, self.elements)
        limits = Limits(
            prefetch=knobs.prefetch_bucket, max_live=knobs.max_live, max_reuse_distance=knobs.max_reuse_distance
        )
        small = frozenset(place for place, numel in enumerate(self.tree.numels) if is_persistent(numel, knobs))
        self.levels = _levels(self.tree, small, limits)
        self.segment = 0
        self.last = 0  # segment of the block that runs

    def forward(self, replayer: Replayer) -> Node:
        rule = GradRule(mode="add")
        nodes = []
        for segment, element in enumerate(self.elements):
            inner = chunks.forward([element], replayer, Wrap(), rule)
            nodes.append(Sequence([*self._enter(segment), inner, *self._leave(segment)]))
        return Sequence(nodes)

    def backward(self, backwards: Iterator[Node]) -> Node:
        """backwards: makes that of each element, last first, and calls ``turn`` in each gradient's hook."""
        nodes = []
        for segments in self.tree.backwards:
            self.segment, self.last = segments.start, segments.stop - 1
            before = self._enter(self.segment)
            inner = next(backwards)
            nodes.append(Sequence([*before, inner, *self._leave(self.segment)]))
        return Sequence([*nodes, *(alloc(item) for item in self.second_shards()[-1:] if self.first and item.bytes)])

    def second_shards(self) -> list[Item]:
        """hpZ's: those of each segment, and last of what no module lets go of before the micro-batch ends."""
        if self.shards is None:
            return []
        released = [level.released for level in self.levels]
        rest = sum(self.tree.numels) - sum(released)
        return [_second(numel, self.shards, self.dtype) for numel in (*released, rest)]

    def turn(self, place: int) -> Node:
        """A module's gradients are complete: it lets go of what it took, and the next one's hook has run."""
        if place not in self.tree.ends or self.segment == self.last:
            return EMPTY
        left = self._leave(self.segment)
        self.segment += 1
        return Sequence([*left, *self._enter(self.segment)])

    def _enter(self, segment: int) -> list[Node]:
        level = self.levels[segment]
        flat = _flat(level.peak - level.held, self.dtype)
        return [alloc(_gathered(level.held, self.dtype)), alloc(flat), free(flat)] if level.peak else []

    def _leave(self, segment: int) -> list[Node]:
        level = self.levels[segment]
        made = [alloc(self.second_shards()[segment])] if self.first and level.released else []
        return [*made, free(_gathered(level.held, self.dtype))] if level.peak else made


@cache
def _gathered(numel: int, dtype: str) -> Item:
    """One object for one line of the ledger, so that a release finds its fetch."""
    why = "whole, on their way or in a flat buffer that is waited for"
    return sized("gathered", "gathered parameters", numel, dtype, why=why, lives="fetch to release")


@cache
def _flat(numel: int, dtype: str) -> Item:
    why = "of several parameters, beside the copies out of it"
    return sized("gathered", "flat buffer of a gather", numel, dtype, why=why, lives="while it is copied from")


@cache
def _second(numel: int, shards: int, dtype: str) -> Item:
    lives = "from its first release to the end of the optimizer step"
    return sized("gathered", "secondary shards (hpZ)", numel, dtype, shards=shards, lives=lives)


class _Tree:
    """The modules whose hooks run in a forward and a backward, in that order, with the parameters that are their own.

    A transformers model calls a model inside, and that a rotary embedding after the word embedding's; a layer calls an attention and
    an MLP, and that an activation. None of these has parameters of its own, and neither have those of PEFT: its model, its tuner,
    the layer around a linear and its dropout (peft tuners/lora/layer.py).
    """

    def __init__(self, stack: str, adapted: bool, rank: Rank, elements: tuple[Element, ...]) -> None:
        self.numels: list[int] = []
        self.hooks: list[Hooks] = []
        self.backwards: list[range] = []  # segments of each element's backward, last element first
        self.forwards = len(elements)
        self.deep = stack in _TREES_OF_MODULES
        self.outer = 4 if adapted else 2 if self.deep else 1
        self.trained: list[int | None] = []  # of each parameter, its place among the trained ones
        local = {param.name: param for param in rank.params}
        modules = [list(self._modules(element, local)) for element in elements]
        self.ends = frozenset(place for mine in modules for params in mine for place in self._gradients(params)[:1])
        for segment, element in enumerate(elements):
            self._forward(segment, element, modules[segment])
        for element, mine in zip(reversed(elements), reversed(modules), strict=True):
            self._backward(element, mine)

    def _modules(self, element: Element, local: dict[str, LocalParam]) -> Iterator[tuple[int, ...]]:
        for _ in range(element.size):
            for op, opens in _calls(element.block, self.deep):
                yield from [()] * opens
                mine = [local.get(f"{element.block.name}.{param.name}") for param in op.params if not param.buffer]
                places = tuple(self._place(param) for param in mine if param is not None)
                if is_adapted(op):
                    yield from ((), places[:-2], (), places[-2:-1], places[-1:])
                else:
                    yield places

    def _place(self, param: LocalParam) -> int:
        self.numels.append(param.numel)
        before = sum(place is not None for place in self.trained)
        self.trained.append(before if param.param.trainable else None)
        return len(self.numels) - 1

    def _gradients(self, params: tuple[int, ...]) -> list[int]:
        """Places of a module's gradients among all of them."""
        return [place for param in params if (place := self.trained[param]) is not None]

    def _forward(self, segment: int, element: Element, modules: list[tuple[int, ...]]) -> None:
        first = element.block.role == "embedding"
        outer = self.outer * first
        hooks = [*[()] * outer, *modules, *([()] if first and self.deep else [])]
        self.hooks += [Hooks(params=params, segment=segment) for params in hooks]

    def _backward(self, element: Element, modules: list[tuple[int, ...]]) -> None:
        start = segment = self.backwards[-1].stop if self.backwards else self.forwards
        if not element.block.output.grad:  # nobody asks for a gradient, so that no hook is called
            self.backwards.append(range(start, start + 1))
            return
        if element.mode != PLAIN:
            self._forward(segment, element, modules)  # runs again
        outer = self.outer * (element.block.role == "head")
        # The word embedding's inputs are integers: its backward is never seen to end.
        releases = element.block.role != "embedding"
        left = sum(1 for params in modules if self._gradients(params))
        for params in [*[()] * outer, *reversed(modules)]:
            self.hooks.append(Hooks(params=params, segment=segment, forward=False, releases=releases))
            ends = bool(self._gradients(params))
            left -= ends
            segment += ends and left > 0
        self.backwards.append(range(start, segment + 1))


@lru_cache(maxsize=64)
def _tree(stack: str, adapted: bool, rank: Rank, elements: tuple[Element, ...]) -> _Tree:
    return _Tree(stack, adapted, rank, elements)


@lru_cache(maxsize=64)
def _levels(tree: _Tree, persistent: frozenset[int], limits: Limits) -> list[Level]:
    """Of no micro-batch's size: a search, and advice, ask for one tree again and again."""
    segments = tree.backwards[-1].stop if tree.backwards else 0
    return Coordinator(tuple(tree.numels), persistent, tree.hooks, limits).levels(segments)


def _calls(block: Block, deep: bool) -> Iterator[tuple[Op, int]]:
    """Every op that is a module of its own, with how many modules are entered just before it that only hold others."""
    layer = any(op.kind in ("attention", "delta_rule") for op in block.ops)
    seen_attention = entered_attention = entered_mlp = False
    after = 0
    opens = int(layer)
    for op in block.ops:
        if op.kind == ORIGINAL:  # PEFT's wrapper is a module, and calls the copy
            opens += 1
            continue
        seen_attention = seen_attention or op.kind == "attention" or op.name == "out_proj"
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
