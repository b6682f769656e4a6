"""A step under FSDP2: forwards and backwards wrapped by its gathers and reductions, micro-batch after micro-batch, then the optimizer's."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from ullage.engines import offloaded
from ullage.engines.fsdp2.apart import ApartWrap
from ullage.engines.fsdp2.policy import Units, reduces_each, types_of, wraps_adapters
from ullage.engines.fsdp2.states import gradients, optimizer_step
from ullage.engines.fsdp2.units import Unit
from ullage.engines.fsdp2.wrap import ShardedWrap, Sync
from ullage.job.job import Job
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule, boundary, boundary_grad
from ullage.memory.borders import Stage
from ullage.memory.chunk import Element, Replayer
from ullage.memory.program import EMPTY, Item, Node, Repeat, Sequence, alloc, free
from ullage.memory.rank import Chunk, Rank
from ullage.model.graph import Graph


@dataclass(kw_only=True)
class Step:
    """Of one rank, without a pipeline."""

    job: Job
    graph: Graph
    rank: Rank
    replayer: Replayer
    units: list[Units]
    stages: tuple[Stage, ...]

    def program(self) -> Node:
        return Sequence([self.passes(), optimizer_step(self.job, self.rank, self.units), self._zero_grad()])

    def passes(self) -> Node:
        """Every micro-batch's forward and backward."""
        count = self.job.data.grad_accum
        wrap = ApartWrap if wraps_adapters(self.job) else ShardedWrap
        forward = self.forward(0, wrap(self.units[0]))
        nodes: list[Node] = []
        each = reduces_each(self.job)
        for number, times in _spans(count):
            last = number + times == count
            sync = Sync(
                reduces=each or last,
                first=number == 0 or not each,
                unsynced_before=number > 0 and not each,
            )
            backward = self.backward(0, wrap(self.units[0], sync, views=self.views(0)))
            one = Sequence([Sequence([forward], "forward", ("F", 0)), Sequence([backward], "backward", ("B", 0))])
            nodes.append(repeated(times, one))
        return Sequence(nodes)

    def elements(self, index: int) -> list[Element]:
        """A chunk's blocks as they run."""
        part = self.rank.chunks[index]
        return self.replayer.elements(part, self.stages[index].ahead.slots, received=not part.first)

    def forward(self, index: int, wrap: ShardedWrap) -> Node:
        part = self.rank.chunks[index]
        elements = self.elements(index)
        inner = chunks.forward(elements, self.replayer, wrap, GradRule())
        leave = chunks.leave_context(elements, self.replayer, GradRule())
        last = self.units[index].unit(elements[-1].block) or _last_unit(self.units[index], part)
        return Sequence([*wrap.before_forward(), inner, leave, *wrap.after_forward(last)])

    def backward(self, index: int, wrap: ShardedWrap) -> Node:
        part = self.rank.chunks[index]
        inner = chunks.backward(self.elements(index), self.replayer, wrap, self.rule(wrap))
        before: list[Node] = [free(boundary(4)), alloc(boundary_grad(4))] if part.last else []
        return Sequence([*before, inner, self.root_reduces(index, wrap)])

    @property
    def host_bytes(self) -> int:
        """Of one rank: what its activations take of the host."""
        return sum(
            offloaded.host_bytes(self.job, self.replayer.context, self.elements(index))
            for index in range(len(self.rank.chunks))
        )

    def root_reduces(self, index: int, wrap: ShardedWrap) -> Node:
        """What the root does with its gradients once a backward is through."""
        elements = self.elements(index)
        first = self.units[index].unit(elements[0].block) or _first_unit(self.units[index], self.rank.chunks[index])
        return Sequence(wrap.after_backward(self._root_grads(index, wrap), first), "reducing the root's gradients")

    def views(self, index: int) -> frozenset[str]:
        """Weights of a chunk whose gradient autograd adds nothing to in place."""
        return frozenset(
            f"{run.block.name}.{name}"
            for run in self.rank.chunks[index].runs
            for name in self.replayer.program(run.block, chunks.PLAIN, GradRule()).views
        )

    def rule(self, wrap: ShardedWrap) -> GradRule:
        """Unsharded gradients of earlier micro-batches wait in ``.grad`` where they have the reduction's type, and autograd adds to each;
        else aside, until the group's backward is through (_fsdp_param.py, to_accumulated_grad_if_needed). A halved backward keeps
        the whole graph for its second half (pipelining/_backward.py, retain_graph)."""
        halves = "all" if wrap.halved else None
        types = types_of(self.job)
        if isinstance(wrap, ApartWrap):
            return wrap.rule(types)
        if not wrap.sync.unsynced_before or types.compute != types.reduce or self.job.engine.name == "fsdp1":
            return GradRule(halves=halves)
        pending = frozenset(name.partition(".")[2] for pair in self.graph.tied for name in pair)
        return GradRule(mode="add", halves=halves, pending=pending)

    def _root_grads(self, index: int, wrap: ShardedWrap) -> list[tuple[str, Item]]:
        """Gradients that blocks without a unit of their own have left, by their parameters' names."""
        units, rule = self.units[index], self.rule(wrap)
        return [
            (f"{run.block.name}.{name}", item)
            for run in self.rank.chunks[index].runs
            if units.unit(run.block) is None
            for name, item in self.replayer.program(run.block, chunks.PLAIN, rule).grads
            if f"{run.block.name}.{name}" not in units.joined
        ]

    def all_units(self) -> list[tuple[Unit, int]]:
        """Each unit of the rank, and how many blocks have one."""
        found = []
        for units, part in zip(self.units, self.rank.chunks, strict=True):
            counts: dict[str, int] = {}
            for run in part.runs:
                counts[run.block.name] = counts.get(run.block.name, 0) + run.repeat
            found += gradients(units, counts)
        return found

    def _zero_grad(self) -> Node:
        on_device = [free(unit.gradient, count) for unit, count in self.all_units() if not unit.gradient_leaves]
        return Sequence(on_device, "zero_grad")


def losses(elements: ListLike[Element]) -> list[Element]:
    """A loss that no module computes: its input is the last stage's output."""
    return [one for one in elements if one.block.role == "loss"]


def _spans(count: int) -> list[tuple[int, int]]:
    """(index, times): the first micro-batch, those between, the last."""
    spans = [(0, 1)]
    if count > 2:
        spans.append((1, count - 2))
    if count > 1:
        spans.append((count - 1, 1))
    return spans


def repeated(times: int, node: Node) -> Node:
    return node if times == 1 else Repeat(times, node) if times else EMPTY


def _last_unit(units: Units, part: Chunk) -> Unit | None:
    return next((unit for run in reversed(part.runs) if (unit := units.unit(run.block)) is not None), None)


def _first_unit(units: Units, part: Chunk) -> Unit | None:
    return next((unit for run in part.runs if (unit := units.unit(run.block)) is not None), None)
