"""A block's steps run backward, recomputing on the way.

A node's backward makes the gradients of what it read, then lets go of what it saved and of the gradients of what it made. A gradient
that arrives a second time is added in place if nobody else holds the first and it is no view or DTensor; else the sum is a new tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ullage.kernels.step import Buffer, Crossing, Step, WeightGrad, gradient_of
from ullage.memory.block import BlockSteps, boundary_grad, carried_grad
from ullage.memory.forward import Forward
from ullage.memory.program import Item
from ullage.memory.segments import Segments
from ullage.memory.storage import Items, Storage, Storages
from ullage.memory.weight_grads import WeightGrads

LATER = "weights"
"""Holder of what waits for the half of a backward that makes weights' gradients."""


class _Later(NamedTuple):
    step: int
    weights: tuple[WeightGrad, ...]
    kept: tuple[Storage, ...]


_Made = tuple[list[tuple[str, Storage]], list[tuple[WeightGrad, Item]]]


class Backward:
    """Undoes the forward of one block."""

    __slots__ = (
        "_begun", "_block", "_forward", "_framed", "_grads", "_halves", "_items", "_later", "_live", "_rerun", "_segments",
        "_sums", "_to_the_end", "_weights", "_wrapped",
    )  # fmt: skip

    def __init__(
        self,
        block: BlockSteps,
        segments: Segments,
        live: Storages,
        items: Items,
        *,
        forward: Forward,
        weights: WeightGrads,
        halves: str | None = None,
    ) -> None:
        self._block = block
        self._segments = segments
        self._live = live
        self._items = items
        self._forward = forward
        self._weights = weights
        self._begun: dict[str, int] = {}
        self._grads: dict[str, Storage] = {}
        self._rerun: set[int] = set()
        self._framed: dict[int, list[Storage]] = {}  # gradients that the frame of a reentrant segment names
        self._halves = halves
        self._later: list[_Later] = []
        self._to_the_end: list[Storage] = []
        self._sums = {one.name: one for step in block.steps for one in step.sums}
        self._wrapped = frozenset(name for step in block.steps for name in step.wrapped)

    def run(self) -> None:
        block = self._block
        if block.output in self._live:
            size = next(buffer.bytes for step in block.steps for buffer in step.writes if buffer.name == block.output)
            arriving = boundary_grad(size if block.output_grad else 0)
            self._grads[block.output] = Storage(arriving, ("grad", block.output))
        for name, one in self._sums.items():
            if gradient_of(name) not in block.handed:  # blocks behind have made it
                self._grads[name] = Storage(carried_grad(one.bytes, one.slot), ("grad", name))
        for index in reversed(range(len(block.steps))):
            for number in self._segments.needed_by(index):
                if number not in self._rerun:
                    self._recompute(number, index)
            self._step(index)
            if (left := self._segments.starting_at(index)) is not None:
                self._leave(left)
        self._hand_over()

    @property
    def begun(self) -> tuple[tuple[str, int], ...]:
        """Weights, with how many changes there were before the last node began that makes their gradients."""
        return tuple(self._begun.items())

    # -- halves

    def _waits(self, weight: WeightGrad) -> bool:
        return self._halves == "all" or (self._halves == "matmuls" and weight.fusable)

    def _at_once(self, step: Step) -> tuple[WeightGrad, ...]:
        return tuple(weight for weight in step.weights if not self._waits(weight))

    def _leave_for_later(self, index: int, arriving: list[str]) -> None:
        """Keeps what the weights' half needs of a step: what it saved, and for its weights the gradients that arrive."""
        if self._halves is None:
            return
        step = self._block.steps[index]
        waiting = tuple(weight for weight in step.weights if self._waits(weight)) if arriving else ()
        if not waiting and self._halves != "all":
            return
        kept = [self._live[name] for name in dict.fromkeys(step.saves) if name in self._live]
        if not self._is_held(index):
            for storage in kept:
                storage.holders.add((LATER, self))
            self._to_the_end += kept
            return
        kept += [self._grads[name] for name in arriving] if waiting else []
        for storage in kept:
            storage.holders.add((LATER, index))
        self._later.append(_Later(step=index, weights=waiting, kept=tuple(kept)))

    def _is_held(self, index: int) -> bool:
        """Whether a node is one that a weight's node, or a later block's, is reached from: autograd's graph points to what ran before."""
        steps = self._block.steps
        return not self._block.ends or any(step.weights for step in steps[index:])

    def left(self) -> tuple[Item, ...]:
        """What is kept to the end of the chunk's first half, and then let go."""
        found = []
        for storage in dict.fromkeys(self._to_the_end):
            storage.holders.discard((LATER, self))
            if not storage.holders and storage.item.bytes:
                found.append(storage.item)
        return tuple(found)

    def make_weights(self) -> None:
        """The half that was left for later, in the order in which the other half came by."""
        for one in self._later:
            taken = self._of_weights(one.weights)
            for storage in one.kept:
                self._live.release(storage, (LATER, one.step))
            for weight, item in taken:
                self._weights.take(weight, item)

    # -- segments

    def _recompute(self, number: int, index: int) -> None:
        self._rerun.add(number)
        self._forward.again(number, backward_at=index)
        if self._segments[number].reentrant:
            for name in self._segments.outputs(number):
                self._live.hold(name, ("segment", number))
                self._live.let_go(name, ("again", name))
                if name in self._grads:
                    self._grads[name].holders.add(("segment", number))
                    self._framed.setdefault(number, []).append(self._grads[name])

    def _leave(self, number: int) -> None:
        for name in self._segments.touched(number):
            if name in self._live:
                self._live.let_go(name, ("segment", number))
                self._live.let_go(name, ("kept", number))
        for gradient in self._framed.pop(number, []):
            self._live.release(gradient, ("segment", number))

    # -- steps

    def _step(self, index: int) -> None:
        step = self._block.steps[index]
        arriving = [name for name in step.made if name in self._grads]
        for weight in step.weights if arriving else ():
            self._begun[weight.param] = self._live.changes
        self._leave_for_later(index, arriving)
        for name in step.offloads:
            if not self._live[name].holders:
                self._live.alloc(self._live[name].item)
            self._live.hold(name, ("saved", index))
        new, taken = self._gradients(step, index, arriving) if arriving else ([], [])
        for name, storage in new:
            storage.holders.add(("new", name))
        if recomputed := self._is_recomputed(index):
            self._let_go_of_saved(index)
        if arriving:
            late, later = self._summed(step, arriving)
            for name, storage in late:
                storage.holders.add(("new", name))
            new, taken = [*new, *late], [*taken, *later]
        if not recomputed:
            self._let_go_of_saved(index)
        self._live.free(*self._crossing(step.receives))
        for name in arriving:
            self._live.release(self._grads.pop(name), ("grad", name))
        if step.leaf:  # it goes with the graph that names it (memory/chunk.py)
            self._live.alloc(*(carried_grad(one.bytes, one.slot) for one in step.lends))
        for name, storage in new:
            self._accumulate(name, storage)
            self._live.release(storage, ("new", name))
        for weight, item in taken:
            self._weights.take(weight, item)

    def _is_recomputed(self, index: int) -> bool:
        """Whether a node gets what it saved from a checkpoint's hook: nobody but its own backward has that (torch/utils/checkpoint.py).

        What a node saved by itself goes when the engine is through with it, sums of gradients included.
        """
        number = self._segments.at(index)
        return number is not None and not self._segments[number].reentrant

    def _let_go_of_saved(self, index: int) -> None:
        for name in dict.fromkeys(self._block.steps[index].saves):
            if name in self._live:
                self._live.let_go(name, ("saved", index))

    def _fitted(self, step: Step, arriving: list[str]) -> list[tuple[str, Storage]]:
        fitted = []
        for fit in step.fits:
            made = self._transient(fit.made, step)
            if fit.total is not None:
                total = self._transient(fit.total, step)
                self._live.alloc(total)
                self._live.free(made)
                made = total
            fitted.append((fit.read, self._gradient(step, fit.read, arriving[0])))
            self._live.free(made)
        return fitted

    def _transient(self, buffer: Buffer, step: Step) -> Item:
        return self._items.tensor(buffer, "transient", f"backward of {step.name}")

    def _gradients(self, step: Step, index: int, arriving: list[str]) -> _Made:
        """What a node's own backward makes, handed on after it has let go of its own: gradients of its reads, and of weights
        those that the engine takes at once. One of a weight that the forward made is the engine's from here on."""
        scratch = [self._transient(buffer, step) for buffer in step.backward_scratch]
        self._live.alloc(*scratch, *(self._transient(fit.made, step) for fit in step.fits))
        later = {*step.no_grad, *step.summed, *(fit.read for fit in step.fits)}
        made = [
            (name, self._gradient(step, name, arriving[0])) for name in dict.fromkeys(step.reads) if name not in later
        ]
        self._live.alloc(*self._crossing(step.sends))
        weights = [weight for weight in self._at_once(step) if weight.param not in step.summed]
        for made_before in (saved for weight in weights for name, saved in step.hands if name == weight.param):
            self._live.let_go(made_before, ("saved", index))
        taken = self._of_weights(weights)
        self._live.free(*scratch)
        return made, taken

    def _summed(self, step: Step, arriving: list[str]) -> _Made:
        """Gradients that the engine sums, or sums and casts, when the node's own function has returned."""
        made = self._fitted(step, arriving)
        made += [(name, self._gradient(step, name, arriving[0])) for name in step.reads if name in step.summed]
        return made, self._of_weights(weight for weight in self._at_once(step) if weight.param in step.summed)

    def _of_weights(self, weights: Iterable[WeightGrad]) -> list[tuple[WeightGrad, Item]]:
        return [(weight, item) for weight in weights if (item := self._weights.make(weight)) is not None]

    def _crossing(self, gradients: tuple[Crossing, ...]) -> list[Item]:
        return [carried_grad(one.bytes, one.slot) for one in gradients if one.name in self._block.handed]

    def _gradient(self, step: Step, name: str, arriving: str) -> Storage:
        if name in step.passes:
            return self._grads[arriving]
        if name in step.reuses:
            return self._live[name]
        if (made := dict(step.hands).get(name)) is not None:
            return self._live[made]
        return self._live.new(self._grad_item(name), is_view=name in step.view_grads)

    def _grad_item(self, name: str) -> Item:
        if name == self._block.input:
            return boundary_grad(self._block.input_bytes)
        if name in self._sums:
            return carried_grad(self._sums[name].bytes, self._sums[name].slot)
        return self._items.gradient(name, self._live.bytes_of(name), self._live[name].item)

    def _accumulate(self, name: str, storage: Storage) -> None:
        before = self._grads.get(name)
        if before is None:
            storage.holders.add(("grad", name))
            self._grads[name] = storage
        elif len(before.holders) > 1 or before.is_view or name in self._wrapped:
            total = self._live.new(self._grad_item(name))
            total.holders.add(("grad", name))
            self._live.release(before, ("grad", name))
            self._grads[name] = total

    def _hand_over(self) -> None:
        """What is left: the input's gradient becomes the previous block's, one that several blocks add up goes on; anything else would
        be a leak."""
        block = self._block
        last = self._grads.pop(block.input, None) if block.input is not None else None
        arrives = boundary_grad(block.input_bytes)
        waits = last is not None and any(holder[0] == LATER for holder in last.holders)  # then it is counted twice
        if last is not None and (waits or last.item is not arrives):
            self._live.release(last, ("grad", block.input))
            self._live.alloc(arrives)
        for name in list(self._grads):
            left = self._grads.pop(name)
            goes_on = name in self._sums
            if goes_on and left.item is self._grad_item(name) and len(left.holders) == 1:
                continue
            self._live.release(left, ("grad", name))
            self._live.alloc(*([self._grad_item(name)] if goes_on else []))
        for name in self._live:
            held = {one for one in self._live[name].holders if one[0] != LATER} - {("outside", name)}
            assert not held or name == block.output, (name, held)
