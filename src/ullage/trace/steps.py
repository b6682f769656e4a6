"""A traced step, told again as the steps of memory/block.py: what each op's forward allocated and kept, what its backward did.

Everything is said by lives, nothing by autograd's rules: a tensor is saved by the step in whose backward it died, a gradient is made in
the step whose backward made it and goes with the one that let go of it. So the replay of a block is the trace of it, allocation by
allocation, and the rest of ullage (recompute, ZeRO, pipelines) applies to it as to any other block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ullage.trace.events import Allocation, Trace, TracedOp

_STATES = frozenset({"parameters", "buffers", "optimizer", "gathered", "communication"})


@dataclass(slots=True)
class Tick:
    """One op of the forward, and what the backward of its autograd node did. Lives are named by their births.

    dies: lives of an earlier op that ended with this one. saves: lives that ended with the backward of this one.
    made, taken: gradients that the backward made and that outlived it; gradients that it let go of. differentiable: it made a node.
    """

    op: TracedOp
    writes: list[Allocation] = field(default_factory=list)
    scratch: list[Allocation] = field(default_factory=list)
    dies: list[Allocation] = field(default_factory=list)
    saves: list[Allocation] = field(default_factory=list)
    made: list[Allocation] = field(default_factory=list)
    taken: list[Allocation] = field(default_factory=list)
    weights: list[Allocation] = field(default_factory=list)
    extra_bytes: int = 0  # how much higher the backward rose than what it left says
    differentiable: bool = False

    @property
    def idle(self) -> bool:
        lists = (self.writes, self.scratch, self.dies, self.saves, self.made, self.taken, self.weights)
        return not any(lists) and not self.extra_bytes


class Tape:
    """The first micro-batch of the last step of a trace, as Ticks in the order of the forward."""

    def __init__(self, trace: Trace) -> None:
        assert trace.ops, "traced without ops"
        first = next((at for at, op in enumerate(trace.ops) if op.phase == "backward"), len(trace.ops))
        last = next((at for at in range(first, len(trace.ops)) if trace.ops[at].phase != "backward"), len(trace.ops))
        self.trace = trace
        self.forward = trace.ops[:first]
        self.backward = trace.ops[first:last]
        self.start = self.forward[0].at
        self.turn = self.backward[0].at if self.backward else trace.end
        self.end = trace.ops[last].at if last < len(trace.ops) else trace.end
        self.ticks = [Tick(op) for op in self.forward]
        self.params = {one.birth: one for one in trace.allocations if one.category == "parameters"}
        self._forward_at = [op.at for op in self.forward]
        self._backward_at = [op.at for op in self.backward]
        self.steps_back = self._positions()
        self.born = {
            piece.birth: piece
            for one in trace.allocations
            if self.start < one.birth <= self.end
            for piece in _pieces(one)
        }
        self._place_forward()
        self._place_backward()

    def _positions(self) -> list[int]:
        """The tick to which each op of the backward belongs: backwards in order, so that none is later than the one before."""
        numbers = [op.node for op in self.forward]
        for tick, (before, after) in zip(self.ticks, pairwise([0, *numbers]), strict=True):
            tick.differentiable = after > before
        at = len(self.ticks) - 1
        found = []
        for op in self.backward:
            if op.node >= 0:
                of_node = bisect_right(numbers, op.node)
                if of_node < len(self.ticks):
                    at = min(at, of_node)
            found.append(at)
        return found

    def forward_tick(self, time: int) -> int:
        return max(0, bisect_left(self._forward_at, time) - 1)

    def backward_tick(self, time: int) -> int:
        """The tick whose backward ran at ``time``."""
        at = bisect_left(self._backward_at, time) - 1
        return self.steps_back[at] if at >= 0 else len(self.ticks) - 1

    def ended(self, one: Allocation) -> int:
        return self.end + 1 if one.death is None else min(one.death, self.end + 1)

    def _place_forward(self) -> None:
        for one in self.born.values():
            if one.birth > self.turn or one.category in _STATES:
                continue
            tick = self.forward_tick(one.birth)
            death = self.ended(one)
            if death <= self.turn:
                last = self.forward_tick(death)
                if last == tick:
                    self.ticks[tick].scratch.append(one)
                    continue
                self.ticks[last].dies.append(one)
            else:
                saver = self.backward_tick(death) if death <= self.end else 0
                self.ticks[saver].saves.append(one)
            self.ticks[tick].writes.append(one)

    def _place_backward(self) -> None:
        live = self._curve()
        root = next(
            (op.at for op in self.backward if op.node >= 0), self.turn
        )  # until there only the loss's own gradient
        for tick, start, stop in self._intervals():
            left = 0
            for one in self._born_in(start, stop):
                if self.ended(one) <= stop:
                    continue
                left += one.bytes
                if one.category == "gradients" and self.ended(one) > self.end:
                    self.ticks[tick].weights.append(one)
                elif self.ended(one) <= self.end and one.category not in _STATES and one.birth > root:
                    self.ticks[tick].made.append(one)
                    self.ticks[self.backward_tick(self.ended(one))].taken.append(one)
            highest = max(live[start - self.start : stop - self.start + 1])
            self.ticks[tick].extra_bytes = max(0, highest - live[start - self.start] - left)

    def _born_in(self, start: int, stop: int) -> Iterable[Allocation]:
        return (self.born[birth] for birth in range(start + 1, stop + 1) if birth in self.born)

    def _intervals(self) -> list[tuple[int, int, int]]:
        """(tick, from, to): the stretches of the backward that belong to one tick."""
        found: list[tuple[int, int, int]] = []
        for at, tick in enumerate(self.steps_back):
            stop = self._backward_at[at + 1] if at + 1 < len(self.backward) else self.end
            if found and found[-1][0] == tick:
                found[-1] = (tick, found[-1][1], stop)
            else:
                found.append((tick, self._backward_at[at], stop))
        return found

    def _curve(self) -> list[int]:
        """Live bytes after each event from the start of the forward to the end of the backward, counted from its start."""
        change: dict[int, int] = defaultdict(int)
        for one in self.trace.allocations:
            if self.start < one.birth <= self.end:
                change[one.birth] += one.bytes
            if one.death is not None and self.start < one.death <= self.end:
                change[one.death] -= one.bytes
        live, curve = 0, []
        for at in range(self.start, self.end + 1):
            live += change[at]
            curve.append(live)
        return curve


def _pieces(one: Allocation) -> Iterator[Allocation]:
    """A gradient that sums were written over, as one gradient after another: each belongs to the tick that made it."""
    for birth, death in pairwise((one.birth, *one.rewritten, one.death)):
        assert birth is not None
        yield one if not one.rewritten else replace(one, birth=birth, death=death, rewritten=())
