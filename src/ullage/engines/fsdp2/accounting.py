"""What FSDP2 keeps on one rank, and when. Closed forms and traces behind it: docs/architecture.md.

Under torch's pipeline schedules a stage neither reshards after a backward nor reduces until its last micro-batch is done: whole
parameters and unsharded gradients stay (torch distributed/pipelining/stage.py ``backward_maybe_with_nosync``).
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import lru_cache

from ullage.engines.base import Account, context_of
from ullage.engines.fsdp2.policy import Units, reduces_each, types_of, units_of, unwrapped
from ullage.engines.fsdp2.states import beside, gradients, host_bytes, optimizer_step, states
from ullage.engines.fsdp2.units import Unit
from ullage.engines.fsdp2.wrap import ShardedWrap, Sync, drop, gather, reduce_scatter, take
from ullage.engines.pipeline import actions_of
from ullage.engines.recompute import stops_early
from ullage.engines.replica import plain
from ullage.errors import Unsupported
from ullage.frozen import FrozenMap
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule, boundary, boundary_grad, carried, carried_grad
from ullage.memory.borders import Stage, stages_of
from ullage.memory.chunk import Element, Replayer, stream_bytes
from ullage.memory.handing import made_for_later, sent_before
from ullage.memory.program import EMPTY, Item, Node, Repeat, Sequence, alloc, free, round_up
from ullage.memory.rank import Chunk, Rank
from ullage.model.graph import Graph
from ullage.schedule import compact
from ullage.schedule.base import Action, Kind

_NOT_MODELLED = {
    "graph_trainer": "captures the whole step as one graph, whose passes decide what is saved and where it is gathered",
    "simple_fsdp": "turns sharding into ops of a captured graph, whose passes decide what is saved and where it is gathered",
    "float8_layers": "converts some of the layers, which are taken as equal here",
}


def _refuse(job: Job) -> None:
    for option, why in _NOT_MODELLED.items():
        value = job.engine.options.get(option)
        if value:
            raise Unsupported(f"{why}; this is not modelled", key=f"engine.options.{option}", value=value)


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    _refuse(job)
    alone = unwrapped(job)
    if alone is not None:
        return replace(plain(alone, graph, rank), groups=_groups(job))
    context = _context(job, graph)
    replayer = Replayer(context=context, recompute=job.recompute, early_stop=stops_early(job, context))
    units = [units_of(job, graph, rank, part) for part in rank.chunks]
    stages = stages_of(graph, job.layout, rank, context)
    static = [
        *states(job, rank, units),
        *beside(job, context, _rotary_dim(graph)),
        *_receive_buffers(job, rank, stages),
    ]
    step = _Step(job=job, graph=graph, rank=rank, replayer=replayer, units=units, stages=stages)
    return Account(
        static=tuple((item, count) for item, count in static if item.bytes and count),
        step=step.program(),
        late=tuple(item for item, _ in static if item.category == "optimizer"),
        host_bytes=host_bytes(job, rank, units),
        groups=_groups(job),
    )


def _context(job: Job, graph: Graph) -> Context:
    """The kernels' view; 8-bit compute without a recipe is torchao's default, tensorwise scaling."""
    context = context_of(job, graph)
    if job.precision.compute != "fp8" or "float8_recipe" in context.options:
        return context
    return replace(context, options=FrozenMap({**context.options, "float8_recipe": "tensorwise"}))


def _rotary_dim(graph: Graph) -> int:
    for name in ("rope_dim", "head_dim"):
        if name in graph.sizes:
            return graph.size(name)
    return 0


@lru_cache(maxsize=256)
def _receive_buffer(size: int, what: str) -> Item:
    return Item(
        category="communication",
        what=f"receive buffer of the stage's {what}",
        bytes=size,
        formula="one boundary activation for each micro-batch",
        lives="the whole run",
    )


def _receive_buffers(job: Job, rank: Rank, stages: ListLike[Stage]) -> list[tuple[Item, int]]:
    """torch.distributed.pipelining: a receive buffer of each tensor for each micro-batch, made once, kept (stage.py
    ``_setup_forward_recv_info``, ``_setup_backward_recv_info``)."""
    count = job.data.grad_accum
    return [
        (_receive_buffer(round_up(size), what), count)
        for stage in stages
        for what, sizes in (("input", stage.behind.tensors), ("output gradient", stage.ahead.gradients))
        for size in sizes
    ]


@dataclass(kw_only=True)
class _Step:
    job: Job
    graph: Graph
    rank: Rank
    replayer: Replayer
    units: list[Units]
    stages: tuple[Stage, ...]

    @property
    def pipelined(self) -> bool:
        return self.job.layout.pp > 1

    def program(self) -> Node:
        passes = self._pipeline() if self.pipelined else self._micro_batches()
        return Sequence([passes, optimizer_step(self.job, self.rank, self.units), self._zero_grad()])

    # -- without a pipeline

    def _micro_batches(self) -> Node:
        count = self.job.data.grad_accum
        forward = self._forward(0, ShardedWrap(self.units[0]))
        nodes: list[Node] = []
        each = reduces_each(self.job)
        for number, times in _spans(count):
            last = number + times == count
            sync = Sync(
                reduces=each or last,
                first=number == 0 or not each,
                unsynced_before=number > 0 and not each,
            )
            backward = self._backward(0, ShardedWrap(self.units[0], sync, views=self._views(0)))
            one = Sequence([Sequence([forward], "forward", ("F", 0)), Sequence([backward], "backward", ("B", 0))])
            nodes += [one] * times if times == 1 else [_repeat(times, one)]
        return Sequence(nodes)

    def _elements(self, index: int) -> list[Element]:
        part = self.rank.chunks[index]
        elements = self.replayer.elements(part, self.stages[index].ahead.slots, received=not part.first)
        losses = _losses(elements) if self.pipelined else []
        return [replace(one, owns_input=False) if one in losses else one for one in elements]

    def _forward(self, index: int, wrap: ShardedWrap) -> Node:
        part = self.rank.chunks[index]
        elements = self._elements(index)
        inner = chunks.forward(elements, self.replayer, wrap, GradRule())
        leave = chunks.leave_context(elements, self.replayer, GradRule())
        last = self.units[index].unit(elements[-1].block) or _last_unit(self.units[index], part)
        return Sequence([*wrap.before_forward(), inner, leave, *wrap.after_forward(last)])

    def _backward(self, index: int, wrap: ShardedWrap) -> Node:
        part = self.rank.chunks[index]
        elements = self._elements(index)
        rule = self._rule(wrap.sync)
        inner = chunks.backward(elements, self.replayer, wrap, rule)
        before: list[Node] = [free(boundary(4)), alloc(boundary_grad(4))] if part.last else []
        first = self.units[index].unit(elements[0].block) or _first_unit(self.units[index], part)
        after = wrap.after_backward(self._root_grads(index, rule), first)
        return Sequence([*before, inner, Sequence(after, "reducing the root's gradients")])

    def _views(self, index: int) -> frozenset[str]:
        """Weights of a chunk whose gradient autograd adds nothing to in place."""
        return frozenset(
            f"{run.block.name}.{name}"
            for run in self.rank.chunks[index].runs
            for name in self.replayer.program(run.block, chunks.PLAIN, GradRule()).views
        )

    def _rule(self, sync: Sync) -> GradRule:
        """Unsharded gradients of earlier micro-batches wait in ``.grad`` where they have the reduction's type, and autograd adds to each;
        else aside, until the group's backward is through (_fsdp_param.py, to_accumulated_grad_if_needed)."""
        types = types_of(self.job)
        if not sync.unsynced_before or types.compute != types.reduce or self.job.engine.name == "fsdp1":
            return GradRule()
        return GradRule(
            mode="add", pending=frozenset(name.partition(".")[2] for pair in self.graph.tied for name in pair)
        )

    def _root_grads(self, index: int, rule: GradRule) -> list[tuple[str, Item]]:
        """Gradients that blocks without a unit of their own have left, by their parameters' names."""
        units = self.units[index]
        return [
            (f"{run.block.name}.{name}", item)
            for run in self.rank.chunks[index].runs
            if units.unit(run.block) is None
            for name, item in self.replayer.program(run.block, chunks.PLAIN, rule).grads
            if f"{run.block.name}.{name}" not in units.joined
        ]

    # -- with a pipeline

    def _pipeline(self) -> Node:
        nodes: dict[_Pass, Node] = {}

        def node(key: _Pass) -> Node:
            if key not in nodes:
                nodes[key] = self._stage_pass(*key)
            return nodes[key]

        body: list[Node] = []
        fresh = set(range(self.job.layout.vpp))
        closed = {index: self._gathers_late(units) for index, units in enumerate(self.units)}
        for times, pattern in compact(actions_of(self.job, self.rank.index)):
            # the first backward of each chunk makes its accumulated gradients, and a pass may leave parameters otherwise than it finds
            # them: runs in which that changes are written out
            while times:
                before = set(fresh), dict(closed)
                one = Sequence([node(self._pass(action, fresh, closed)) for action in pattern])
                repeats = times if before == (fresh, closed) else 1
                body.append(_repeat(repeats, one))
                times -= repeats
        sent = [item for index in range(len(self.stages)) for item in self._sent(index)]
        return Sequence([self._gather_stage(), *body, self._reduce_stage(), *drop(sent)])

    def _pass(self, action: Action, fresh: set[int], closed: dict[int, bool]) -> _Pass:
        """A forward leaves units that reshard without their parameters, a backward with them."""
        is_first = action.kind == "B" and action.chunk in fresh
        if is_first:
            fresh.remove(action.chunk)
        found = action.kind, action.chunk, is_first, closed[action.chunk]
        closed[action.chunk] = action.kind == "F" and _reshards(self.units[action.chunk])
        return found

    def _gathers_late(self, units: Units) -> bool:
        """Whether units that reshard wait for their first forward; schedules of several chunks gather ahead of it."""
        return self.job.layout.vpp == 1 and _reshards(units)

    def _stage_pass(self, kind: Kind, index: int, is_first: bool, closed: bool) -> Node:
        part, stage = self.rank.chunks[index], self.stages[index]
        sync = Sync(reduces=False, unsynced_before=not is_first)
        wrap = ShardedWrap(self.units[index], sync, resident=True, closed=closed, views=self._views(index))
        if kind == "F":
            return Sequence([self._forward(index, wrap)], "forward", ("F", index))
        inner = self._backward(index, wrap)
        sent = self._sent(index)
        after = [*self._outputs(index), *([] if is_first else drop(sent))]
        arriving = stage.ahead.stream if part.runs[-1].block.output.grad else 0  # else the steps tell what they take
        if part.last:
            return Sequence([inner, *after], "backward", ("B", index))
        buffer = _receive_buffer(round_up(arriving), "output gradient")
        before = [free(buffer), alloc(boundary_grad(arriving))]
        return Sequence([*before, inner, *after, alloc(buffer)], "backward", ("B", index))

    def _outputs(self, index: int) -> list[Node]:
        """What a chunk hands on, which its frame names to the end of its backward (``backward_one_chunk``): let go."""
        stage, elements = self.stages[index], self._elements(index)
        made = made_for_later(self.replayer.crossings(elements), stage.ahead.slots)
        streams = [boundary(stage.ahead.stream)] if not self.rank.chunks[index].last else []
        streams += [boundary(stream_bytes(one.block.input, self.replayer.context)) for one in _losses(elements)]
        return drop([*streams, *(carried(one.bytes, one.slot, one.what) for _, one in made)])

    def _sent(self, index: int) -> list[Item]:
        """The gradients that a chunk sends. The schedule names them until it has those of the next micro-batch (schedules.py,
        ``bwd_sends``), so that one micro-batch's are always there."""
        part = self.rank.chunks[index]
        if part.first:
            return []
        beside = sent_before(self.replayer.crossings(self._elements(index)))
        stream = self.stages[index].behind.stream if part.runs[0].block.input.grad else 0
        return [boundary_grad(stream), *(carried_grad(one.bytes, one.slot) for one in beside)]

    def _gather_stage(self) -> Node:
        """Every group of the rank that is gathered at the start of a step, and once."""
        nodes: list[Node] = []
        for unit, count in self._all_units():
            if unit.reshards and self.job.layout.vpp == 1:
                continue
            nodes.append(_repeat(count, Sequence([*gather(unit), *take(unit.gathered), *drop([unit.staging])])))
        return Sequence(nodes, "gathering the stage's parameters")

    def _reduce_stage(self) -> Node:
        """After the last micro-batch: group after group is reduced and lets its parameters go."""
        nodes: list[Node] = []
        for unit, count in self._all_units():
            one = [
                *drop(unit.gathered),
                *reduce_scatter(unit, list(unit.accumulated), first=True),
                *drop([unit.reduce_input]),
            ]
            nodes.append(_repeat(count, Sequence(one)))
        return Sequence(nodes, "reducing the stage's gradients")

    # -- both

    def _all_units(self) -> list[tuple[Unit, int]]:
        found = []
        for units, part in zip(self.units, self.rank.chunks, strict=True):
            counts: dict[str, int] = {}
            for run in part.runs:
                counts[run.block.name] = counts.get(run.block.name, 0) + run.repeat
            found += gradients(units, counts)
        return found

    def _zero_grad(self) -> Node:
        return Sequence([free(unit.gradient, count) for unit, count in self._all_units()], "zero_grad")


_Pass = tuple[Kind, int, bool, bool]
"""A pass of a chunk: kind, chunk, whether it is its first backward, and whether its units that reshard have no parameters."""


def _reshards(units: Units) -> bool:
    return any(unit.reshards for unit in units.of.values())


def _losses(elements: ListLike[Element]) -> list[Element]:
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


def _repeat(times: int, node: Node) -> Node:
    return node if times == 1 else Repeat(times, node) if times else EMPTY


def _last_unit(units: Units, part: Chunk) -> Unit | None:
    return next((unit for run in reversed(part.runs) if (unit := units.unit(run.block)) is not None), None)


def _first_unit(units: Units, part: Chunk) -> Unit | None:
    return next((unit for run in part.runs if (unit := units.unit(run.block)) is not None), None)


def _groups(job: Job) -> tuple[tuple[str, int, int], ...]:
    """(name, ranks, nodes crossed) of the groups that communicate; ranks of a node are neighbours in tp, then cp, then dp, then pp."""
    layout = job.layout
    shard = job.engine.shard_group or layout.dp * layout.cp
    per_node = job.cluster.gpus_per_node
    sizes = {
        "world": (layout.world, layout.world),
        "dp_shard": (shard, layout.tp * shard),
        "dp_replicate": (layout.dp * layout.cp // shard, layout.tp * layout.dp * layout.cp),
        "tp": (layout.tp, layout.tp),
        "pp": (layout.pp, layout.world),
        "cp": (layout.cp, layout.tp * layout.cp),
        "ep": (layout.ep, layout.tp * layout.ep),
    }
    return tuple((name, size, -(-span // per_node)) for name, (size, span) in sizes.items() if size > 1)
