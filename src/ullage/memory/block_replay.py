"""One block, replayed: what its forward allocates, frees and keeps, and what its backward does with that.

The rules are autograd's (forward.py, backward.py). A recompute segment keeps its inputs and ``keep`` alone; on the way back it runs
again before its own backward.
"""

from __future__ import annotations

from ullage.memory.backward import Backward
from ullage.memory.block import BlockProgram, BlockSteps, GradRule, boundary, carried
from ullage.memory.forward import Forward
from ullage.memory.program import Item
from ullage.memory.segments import Segments
from ullage.memory.storage import Items, Storage, Storages
from ullage.memory.weight_grads import WeightGrads


class BlockReplay:
    """Replays one block; call ``run``, or ``left``, once. items: shared by replays of one block whose programs are mixed in one step."""

    __slots__ = ("_backward", "_block", "_forward", "_live", "_weights")

    def __init__(self, block: BlockSteps, *, grad_rule: GradRule = GradRule(), items: Items | None = None) -> None:
        segments = Segments(block)
        items = Items() if items is None else items
        self._block = block
        self._live = Storages()
        self._forward = Forward(block, segments, self._live, items)
        self._weights = WeightGrads(block.steps, grad_rule, self._live, items)
        self._backward = Backward(
            block, segments, self._live, items, forward=self._forward, weights=self._weights, halves=grad_rule.halves
        )

    def run(self) -> BlockProgram:
        block, live = self._block, self._live
        self._run_forward()
        forward = live.program()
        if block.output in live:
            live[block.output].holders.discard(("forward", block.output))  # the next block's from here on
        cached = self._leave_caches()
        self._backward.run()
        backward = live.program()
        left = self._backward.left()
        self._backward.make_weights()
        return BlockProgram(
            forward=forward,
            backward=backward,
            grads=tuple(self._weights.kept.items()),
            cached=cached,
            views=frozenset(self._weights.views),
            weights=live.program(),
            left=left,
            begun=self._backward.begun,
        )

    def left(self) -> frozenset[str]:
        """In place of ``run``: names of the tensors that a forward leaves behind, views of them too."""
        self._run_forward()
        return frozenset(name for name in self._live if self._live[name].holders)

    def _run_forward(self) -> None:
        block, live = self._block, self._live
        if block.input is not None:
            holder = ("forward" if block.owns_input else "outside", block.input)
            live[block.input] = Storage(boundary(block.input_bytes), holder)
        for one in (one for step in block.steps for one in step.borrows):
            holder = ("forward", one.name) if one.name in block.handed else ("outside", one.name)
            live[one.name] = Storage(carried(one.bytes, one.slot, one.what), holder)
        self._forward.first()

    def _leave_caches(self) -> tuple[Item, ...]:
        """Hands what only a cache still holds to whoever ends the forward."""
        left = []
        for name in dict.fromkeys(name for step in self._block.steps for name in step.caches):
            storage = self._live[name]
            storage.holders.discard(("cache", name))
            if not storage.holders:
                left.append(storage.item)
        return tuple(left)
