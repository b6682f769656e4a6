"""FSDP1 whose adapters are units of their own: all else of a block is frozen, gathered but never reduced.

A frozen flat parameter goes once the gradient of its module's input is there (torch distributed/fsdp/_runtime_utils.py,
_post_backward_reshard_only_hook). Units are gathered ahead in the reversed order of the forwards' ends, so that the next block is on its
way no earlier than at the backward of this one's first adapter (_get_handle_to_prefetch). Each adapter's gradient is reduced as it is made.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from ullage.engines.fsdp2.units import Types, Unit
from ullage.engines.fsdp2.wrap import ShardedWrap, drop, gather, take
from ullage.memory.block import BlockProgram, GradRule
from ullage.memory.chunk import Element
from ullage.memory.program import Change, Item, Node, Sequence, alloc, free


class ApartWrap(ShardedWrap):
    """The wrap of one pass."""

    def rule(self, types: Types) -> GradRule:
        """Gradients that are not reduced wait whole in the first backward; later ones are added to them."""
        if not self.sync.reduces and not self.sync.unsynced_before:
            return GradRule()
        casts = self.sync.reduces and types.reduce != types.compute
        return GradRule(mode="add", temporaries=(types.reduce,) if casts else ())

    def _apart(self, element: Element) -> tuple[Unit, ...]:
        """The adapters of an element, wherever the rest of it is."""
        unit = self._unit(element) or self.units.root
        names = {f"{element.block.name}.{param.name}" for param in element.block.params}
        return tuple(one for one in unit.apart if one.name in names) if unit is not None else ()

    # -- forward

    def forward(self, element: Element, node: Node, previous: Element | None, following: Element | None) -> Node:
        adapters = self._apart(element)
        if adapters and adapters[0].reshards:
            largest = max(adapters, key=_gathered)
            node = Sequence([*take(largest.gathered), node, *drop(largest.gathered)])
        elif adapters:
            node = Sequence([*(part for one in adapters for part in take(one.gathered)), node])
        return super().forward(element, node, previous, following)

    # -- backward

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        unit, adapters = self._unit(element), self._apart(element)
        nodes: list[Node] = []
        if unit is not None and unit.reshards and previous is None:
            nodes += gather(unit)
        fetch = self._prefetch(following, element)
        if element.size > 1 and unit is not None:
            made = [node for _ in range(element.size) for one in adapters for node in self._reduced(one)]
            nodes += [*self._group(element.size - 1, unit, program, fetch), *made]
        elif adapters:
            nodes += self._around(adapters, program, fetch)
        elif element.block.role == "head" and not self.units.loss_in_root:
            nodes += [program.backward, *fetch]
        else:
            nodes += [*fetch, program.backward]
        if not self.sync.reduces and not self.sync.unsynced_before:
            nodes += drop(item for _, item in program.grads)
            nodes += [node for _ in range(element.size) for one in adapters for node in take(one.accumulated)]
        return Sequence([*nodes, *(drop(unit.gathered) if unit is not None else [])])

    def _around(self, adapters: tuple[Unit, ...], program: BlockProgram, fetch: list[Node]) -> list[Node]:
        """Two neighbours are whole at once, one of them ahead of time, or all are that stayed after the forward. A gradient is copied
        into that of its flat parameter, and then reduced."""
        assert isinstance(program.backward, Sequence)
        begun = dict(program.begun)
        before: defaultdict[int, list[Node]] = defaultdict(list)
        after: defaultdict[int, list[Node]] = defaultdict(list)
        before[begun[_param(adapters[0])]] += fetch
        steps = list(program.backward.children)
        for one in adapters:
            at = _let_go(steps, begun[_param(one)], _param(one))
            before[at].append(alloc(one.joined_gradient))
            after[at] += [free(one.joined_gradient), *self._reduced(one)]
        backward = [node for at, step in enumerate(steps) for node in (*before[at], step, *after[at])]
        if not adapters[0].reshards:
            return [*backward, *(node for one in adapters for node in drop(one.gathered))]
        pair = max(pairwise(adapters), key=lambda two: sum(map(_gathered, two)), default=adapters)
        return [
            *(node for one in pair for node in take(one.gathered)),
            *backward,
            *(node for one in pair for node in drop(one.gathered)),
        ]

    def _reduced(self, one: Unit) -> list[Node]:
        """An adapter's shard of its gradient, in place of the whole one where earlier micro-batches left that."""
        if not self.sync.reduces:
            return []
        before = drop(one.accumulated) if self.sync.unsynced_before else []
        return [*before, alloc(one.gradient)] if self.sync.first else [*before, alloc(one.added), free(one.added)]

    def after_backward(self, root_grads: list[tuple[str, Item]], last: Unit | None) -> list[Node]:
        root = self.units.root
        return drop(root.gathered) if root is not None else []


def _gathered(unit: Unit) -> int:
    return sum(item.bytes for item in unit.gathered)


def _let_go(steps: list[Node], begun: int, param: str) -> int:
    """The step that lets go of a parameter's gradient, or that begins to make one that stays."""
    for at in range(begun, len(steps)):
        step = steps[at]
        if (
            isinstance(step, Change)
            and step.count < 0
            and step.item.category == "gradients"
            and param in step.item.what
        ):
            return at
    return begun


def _param(unit: Unit) -> str:
    """Its parameter's name in its block."""
    return unit.name.partition(".")[2]
