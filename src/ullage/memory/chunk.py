"""Forward and backward of one model chunk: its blocks in order, each as its recompute mode says, wrapped by the engine.

An engine sees each block with its neighbours (to gather parameters ahead, to reduce gradients behind). Equal neighbourhoods
become one repeated node, so a chunk costs as many nodes as it has kinds of neighbourhood, not as it has layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from ullage.frozen import frozen
from ullage.job.job import Recompute
from ullage.kernels import stacks
from ullage.kernels.step import Context, Segment, Slot
from ullage.memory.block import BlockProgram, BlockSteps, GradRule, boundary, carried, carried_grad
from ullage.memory.block_replay import BlockReplay
from ullage.memory.handing import Crossings, crossings, handed
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, free, round_up
from ullage.memory.rank import Chunk
from ullage.memory.storage import Items
from ullage.model.graph import Block, Tensor

_NodeOf = Callable[["Element | None", "Element", "Element | None"], Node]

PLAIN = "plain"
CHECKPOINT = "checkpoint"
SELECTIVE = "selective"
NO_GRAD = "no-grad"
"""Modes of a block: keeps all, keeps its input, keeps what the stack's policy says, keeps nothing (inside a longer segment)."""


@frozen
class Element:
    """``size`` equal blocks that are checkpointed as one (1: each block by itself), and how. handed, owns_input: see BlockSteps.

    mark: what an engine tells equal blocks apart by."""

    block: Block
    mode: str = PLAIN
    size: int = 1
    handed: frozenset[str] = frozenset()
    owns_input: bool = True
    mark: str = ""


@frozen
class Inputs:
    """What becomes of checkpoints' inputs between forward and backward. stay: of how many, a chunk's last, nothing. parts: in how many
    each is divided, of which one is kept on the device; 0: all of it is on the host."""

    stay: int = 0
    parts: int = 0


GO = "its input goes"
"""Mark of a checkpoint whose input does not stay."""


class Wrap:
    """What an engine does around the blocks; the default does nothing.

    ``previous`` and ``following`` are in the order of the pass: in a backward, previous is the block after this one in the model.
    """

    def forward(self, element: Element, node: Node, previous: Element | None, following: Element | None) -> Node:
        return node

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        return program.backward


@frozen
class Replayer:
    """All that the programs of a chunk's blocks depend on."""

    context: Context
    recompute: Recompute
    early_stop: bool = True
    reentrant: bool = False  # torch.utils.checkpoint(use_reentrant=True) and its like
    method: str = "uniform"  # of {layers: n}: Megatron's names
    group: int = 1
    inputs: Inputs | None = None  # None: they stay

    def program(self, block: Block, mode: str, rule: GradRule) -> BlockProgram:
        return self._alone(Element(block=block, mode=mode), rule)

    def _alone(self, element: Element, rule: GradRule) -> BlockProgram:
        items = self.items(element)
        return _program(element, self.context, rule, self.recompute, self.early_stop, self.reentrant, items)

    def items(self, element: Element) -> Items:
        """The allocations of an element's block, which its programs share. What is kept of them has these for a key: of a process's many
        blocks some are forgotten, and made anew they are other objects."""
        return _items_of(element.block, self.context)

    def element_program(self, element: Element, rule: GradRule) -> BlockProgram:
        if element.mark == GO and self.inputs is not None:
            return _gone(element, self, rule, self.inputs, self.items(element))
        if element.size == 1:
            return self._alone(element, rule)
        return _grouped(element, self, rule, self.items(element))

    def elements(
        self, chunk: Chunk, leaving: frozenset[Slot] = frozenset(), *, received: bool = False
    ) -> list[Element]:
        """A chunk's blocks as they run. leaving: slots of what it hands on beside its output. received: whether its input is in
        buffers that its engine keeps."""
        return list(_elements_of(self, chunk, leaving, received))

    def crossings(self, elements: ListLike[Element]) -> list[tuple[Crossings, bool]]:
        """Of each element what crosses, and whether it is checkpointed. Blocks under one checkpoint keep to themselves."""
        alone = Crossings()
        blocks = {id(one.block): one.block for one in elements}
        known = {key: crossings(block, self.context) for key, block in blocks.items()}
        told = {(id(one.block), one.mode): self._kept(one, known[id(one.block)]) for one in elements if one.size == 1}
        return [(told.get((id(one.block), one.mode), alone), one.mode == CHECKPOINT) for one in elements]

    def _kept(self, element: Element, found: Crossings) -> Crossings:
        """With what the parts of a block that run again read of others: they keep it as if they had saved it."""
        if element.mode != SELECTIVE or not found.any:
            return found
        steps = stacks.lower(element.block, self.context)
        parts = stacks.segments(element.block, self.context, self.recompute)
        read = {name for part in parts for step in steps[part.start : part.stop] for name in step.reads}
        return replace(found, saved=found.saved | (read & {one.name for one in found.borrows}))


@lru_cache(maxsize=256)
def _elements_of(replayer: Replayer, chunk: Chunk, leaving: frozenset[Slot], received: bool) -> tuple[Element, ...]:
    """As ``Replayer.elements``. Blocks that are handed the same are one object."""
    found = _elements(chunk, replayer.recompute, replayer.group, replayer.context.stack)
    if replayer.inputs is not None:
        found = _going(found, replayer.inputs)
    if any(crossings(run.block, replayer.context).any for run in chunk.runs):
        names = handed(replayer.crossings(found), leaving, received=received)
        told = {(id(one), mine): (one, mine) for one, mine in zip(found, names, strict=True)}
        known = {key: replace(one, handed=mine) for key, (one, mine) in told.items()}
        found = [known[id(one), mine] for one, mine in zip(found, names, strict=True)]
    return tuple([replace(found[0], owns_input=False), *found[1:]] if received else found)


def _going(elements: list[Element], inputs: Inputs) -> list[Element]:
    places = [place for place, one in enumerate(elements) if one.mode == CHECKPOINT]
    going = frozenset(places[: len(places) - inputs.stay])
    return [replace(one, mark=GO) if place in going else one for place, one in enumerate(elements)]


def input_bytes(element: Element, context: Context) -> int:
    """Of what a checkpoint keeps and does not stay, whole."""
    return stream_bytes(element.block.input, context) if element.mark == GO else 0


@lru_cache(maxsize=1024)
def _gone(element: Element, replayer: Replayer, rule: GradRule, inputs: Inputs, _items: Items) -> BlockProgram:
    """A checkpoint whose input is let go of once its forward is through, and is there again before its backward."""
    program = replayer.element_program(replace(element, mark=""), rule)
    whole = stream_bytes(element.block.input, replayer.context)
    part = [_part(whole // inputs.parts)] if inputs.parts else []
    assert isinstance(program.backward, Sequence)
    back = [alloc(boundary(whole)), *map(free, part)]
    return replace(
        program,
        forward=Sequence([*map(alloc, part), program.forward, free(boundary(whole))]),
        backward=Sequence([*back, *program.backward.children], program.backward.moment),
        begun=tuple((name, at + len(back)) for name, at in program.begun),
    )


@lru_cache(maxsize=1024)
def _part(n_bytes: int) -> Item:
    return Item(
        category="activations",
        what="this rank's parts of checkpoints' inputs",
        bytes=round_up(n_bytes),
        formula="input of a checkpoint, divided among ranks",
        lives="its forward to its backward",
    )


@lru_cache(maxsize=4096)
def _program(
    element: Element,
    context: Context,
    rule: GradRule,
    recompute: Recompute,
    early_stop: bool,
    reentrant: bool,
    items: Items,
) -> BlockProgram:
    whole = block_steps(element, context, recompute, early_stop=early_stop, reentrant=reentrant)
    return BlockReplay(whole, grad_rule=rule, items=items).run()


def block_steps(
    element: Element, context: Context, recompute: Recompute, *, early_stop: bool = True, reentrant: bool = False
) -> BlockSteps:
    """An element's block, to be replayed."""
    block, mode = element.block, element.mode
    steps = stacks.lower(block, context)
    segments: tuple[Segment, ...] = ()
    if mode in (CHECKPOINT, NO_GRAD):
        segments = (Segment(start=0, stop=len(steps), early_stop=early_stop, reentrant=reentrant),)
    elif mode == SELECTIVE:
        segments = stacks.segments(block, context, recompute)
    is_first = block.role == "embedding"
    return BlockSteps(
        steps=steps,
        input=None if is_first else block.input.name,
        input_bytes=0 if is_first else stream_bytes(block.input, context),
        output=block.output.name,
        segments=segments,
        keeps_input=mode != NO_GRAD,
        output_grad=block.output.grad,
        handed=element.handed,
        owns_input=element.owns_input,
        ends=block.role in ("head", "loss"),
    )


@lru_cache(maxsize=1024)
def _items_of(block: Block, context: Context) -> Items:
    """A block's allocations, the same objects in whichever mode and under whichever rule it is replayed."""
    return Items()


def stream_bytes(tensor: Tensor, context: Context) -> int:
    """Bytes of a tensor that blocks hand on, in the type of the residual stream."""
    return context.buffer(tensor.name, tensor.dims, tensor.elements or context.residual).bytes


@lru_cache(maxsize=1024)
def _grouped(element: Element, replayer: Replayer, rule: GradRule, _items: Items) -> BlockProgram:
    """Several equal blocks under one checkpoint: forward keeps the first input; backward runs all again, then back."""
    first = replayer.element_program(replace(element, size=1), rule)
    inner = replayer.program(element.block, NO_GRAD, rule)
    plain = replayer.program(element.block, PLAIN, rule)
    stream = boundary(stream_bytes(element.block.output, replayer.context))
    again: list[Node] = [Repeat(element.size, plain.forward)]
    back: list[Node] = [Repeat(element.size, plain.backward)]
    if not element.owns_input:  # the first block leaves its input to whoever gave it
        lent = replayer.element_program(replace(element, mode=PLAIN, size=1), rule)
        again = [lent.forward, Repeat(element.size - 1, plain.forward)]
        back = [Repeat(element.size - 1, plain.backward), lent.backward]
    backward = Sequence([*again, free(stream), *back], "recompute")
    grads = tuple((f"{index}.{name}", item) for index in range(element.size) for name, item in plain.grads)
    return BlockProgram(
        forward=Sequence([first.forward, Repeat(element.size - 1, inner.forward)]),
        backward=backward,
        grads=grads,
        cached=first.cached * element.size,
        weights=Sequence([Repeat(element.size, plain.weights)] if plain.weights.children else []),
    )


def _elements(chunk: Chunk, recompute: Recompute, group: int, stack: str) -> list[Element]:
    """The chunk's blocks with their modes; embedding and head are never checkpointed."""
    layers = chunk.layers
    modes = _modes(layers, recompute, stack)
    if recompute.kind == "sqrt":
        group = max(1, round(math.sqrt(layers)))
    elements: list[Element] = []
    at = 0
    for run in chunk.runs:
        if run.block.role != "layer":
            elements += [Element(block=run.block)] * run.repeat
            continue
        mine = modes[at : at + run.repeat]
        at += run.repeat
        for mode, equal in groupby(mine):
            elements += _split(run.block, mode, len(list(equal)), group if mode == CHECKPOINT else 1)
    return elements


def _split(block: Block, mode: str, count: int, group: int) -> list[Element]:
    whole = [Element(block=block, mode=mode, size=group)] * (count // group)
    rest = count % group
    return [*whole, Element(block=block, mode=mode, size=rest)] if rest else whole


_FIRST_OF_EVERY = frozenset({"transformers", "liger"})
"""Stacks that recompute the first of every n layers (transformers modeling_utils.py ``_set_gradient_checkpointing``); torchtitan the last
(distributed/activation_checkpoint.py)."""


def _modes(layers: int, recompute: Recompute, stack: str) -> list[str]:
    if recompute.kind in ("full", "sqrt"):
        return [CHECKPOINT] * layers
    if recompute.kind in ("selective", "modules"):
        return [SELECTIVE] * layers
    if recompute.kind == "every":
        place = 0 if stack in _FIRST_OF_EVERY else recompute.every - 1
        return [CHECKPOINT if index % recompute.every == place else PLAIN for index in range(layers)]
    if recompute.kind == "layers":
        return [CHECKPOINT if index < recompute.layers else PLAIN for index in range(layers)]
    return [PLAIN] * layers


def forward(elements: ListLike[Element], replayer: Replayer, wrap: Wrap, rule: GradRule) -> Node:
    """The forward of a chunk's elements, in model order."""
    built: dict[tuple[Element | None, Element, Element | None], Node] = {}

    def node(previous: Element | None, element: Element, following: Element | None) -> Node:
        key = (previous, element, following)
        if key not in built:
            program = replayer.element_program(element, rule)
            inner = wrap.forward(element, program.forward, previous, following)
            built[key] = Sequence([inner], f"forward of {element.block.name}")
        return built[key]

    return Sequence(_compressed(elements, node))


def leave_context(elements: ListLike[Element], replayer: Replayer, rule: GradRule) -> Node:
    """The end of the context that a forward runs in: what only its caches still hold goes (autocast's copies of weights)."""
    counts: Counter[Item] = Counter()
    for element, same in groupby(elements):
        times = len(list(same))
        for item in replayer.element_program(element, rule).cached:
            counts[item] += times
    return Sequence([free(item, count) for item, count in counts.items()])


def backward(elements: ListLike[Element], replayer: Replayer, wrap: Wrap, rule: GradRule) -> Node:
    """The backward of a chunk's elements (given in model order), last block first."""
    built: dict[tuple[Element | None, Element, Element | None], Node] = {}

    def node(previous: Element | None, element: Element, following: Element | None) -> Node:
        key = (previous, element, following)
        if key not in built:
            program = replayer.element_program(element, rule)
            inner = wrap.backward(element, program, previous, following)
            built[key] = Sequence([inner], f"backward of {element.block.name}")
        return built[key]

    return Sequence([*_compressed(list(reversed(elements)), node), *_leaves(elements, replayer)])


def _leaves(elements: ListLike[Element], replayer: Replayer) -> list[Node]:
    """What autograd's own accumulators keep, and its gradients: with the loss, which names their graph."""
    kinds = {id(one.block): one.block for one in elements}
    found = [
        (one, known)
        for known in (crossings(block, replayer.context) for block in kinds.values())
        for one in known.lends
    ]
    kept = [one for one, known in found if one.name in known.leaves]
    return [
        free(item)
        for one in kept
        for item in (carried(one.bytes, one.slot, one.what), carried_grad(one.bytes, one.slot))
    ]


def weights(elements: ListLike[Element], replayer: Replayer, rule: GradRule) -> Node:
    """What a chunk's halved backward left for later, in the order of that backward."""
    nodes = []
    for element, same in groupby(reversed(elements)):
        left = replayer.element_program(element, rule).weights
        if left.children:
            count = len(list(same))
            nodes.append(Repeat(count, Sequence([left], f"weights' gradients of {element.block.name}")))
    return Sequence(nodes)


def _compressed(elements: ListLike[Element], node: _NodeOf) -> list[Node]:
    """Neighbours are the nearest of the blocks that an engine wraps: what runs between two layers or after the model is none."""
    before, after = _neighbours(elements), _neighbours(elements[::-1])[::-1]
    around = groupby(zip(before, elements, after, strict=True))
    counted = [(node(*one), len(list(same))) for one, same in around]
    return [Repeat(count, first) if count > 1 else first for first, count in counted]


def _neighbours(elements: ListLike[Element]) -> list[Element | None]:
    """Of each element the nearest before it that an engine wraps."""
    found: list[Element | None] = []
    last: Element | None = None
    for element in elements:
        found.append(last)
        if element.block.role not in ("between", "loss"):
            last = element
    return found
