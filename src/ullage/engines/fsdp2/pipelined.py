"""A step of one rank of a pipeline under FSDP2 and torch.distributed.pipelining.

A stage neither reshards after a backward nor reduces until its last micro-batch is done: whole parameters and unsharded gradients stay
(stage.py ``backward_maybe_with_nosync``). A halved backward (_backward.py) keeps all that the forward saved until its second half, and
the gradients that it sends stay in the receive buffers' ``.grad`` to the step's end. The second half adds gradients up in
``.grad`` in the type that they are made in; FSDP casts them only where its hooks next run, in a backward of that stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ullage.engines.fsdp2.policy import Units, types_of
from ullage.engines.fsdp2.step import Step, losses, repeated
from ullage.engines.fsdp2.wrap import ShardedWrap, Sync, drop, gather, reduce_scatter, take
from ullage.engines.pipeline import PASSES, actions_of, micro_batches_of_chunk
from ullage.errors import Unsupported
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory.block import boundary, boundary_grad, carried, carried_grad
from ullage.memory.borders import Stage
from ullage.memory.chunk import Element, stream_bytes
from ullage.memory.handing import made_for_later, sent_before
from ullage.memory.program import EMPTY, Item, Node, Sequence, alloc, free, round_up
from ullage.schedule import Action, compact
from ullage.schedule.base import Kind


@lru_cache(maxsize=256)
def _receive_buffer(size: int, what: str) -> Item:
    return Item(
        category="communication",
        what=f"receive buffer of the stage's {what}",
        bytes=size,
        formula="one boundary activation for each micro-batch",
        lives="the whole run",
    )


def receive_buffers(job: Job, stages: ListLike[Stage]) -> list[tuple[Item, int]]:
    """torch.distributed.pipelining: a receive buffer of each tensor for each micro-batch, made once, kept (stage.py
    ``_setup_forward_recv_info``, ``_setup_backward_recv_info``)."""
    if job.layout.pp == 1:
        return []
    count = micro_batches_of_chunk(job)
    return [
        (_receive_buffer(round_up(size), what), count)
        for stage in stages
        for what, sizes in (("input", stage.behind.tensors), ("output gradient", stage.ahead.gradients))
        for size in sizes
    ]


@frozen
class _Pass:
    """A pass of a chunk.

    sent_before, made_before: whether an earlier backward has sent a gradient, and whether there are accumulated gradients. waiting:
    whether gradients wait in the type that they are made in. closed: whether units that reshard have no parameters.
    """

    kind: Kind
    chunk: int
    sent_before: bool
    made_before: bool
    waiting: bool
    closed: bool


@dataclass
class _State:
    """Between two passes, of each chunk what _Pass says; halved: first halves that have run."""

    closed: dict[int, bool]
    sent: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)

    def copy(self) -> _State:
        return _State(closed=dict(self.closed), sent=set(self.sent), made=set(self.made), waiting=set(self.waiting))


@dataclass(kw_only=True)
class PipelinedStep(Step):
    """Of one rank of a pipeline."""

    def elements(self, index: int) -> list[Element]:
        found = super().elements(index)
        apart = losses(found)
        return [replace(one, owns_input=False) if one in apart else one for one in found]

    def passes(self) -> Node:
        nodes: dict[_Pass, Node] = {}

        def node(key: _Pass) -> Node:
            if key not in nodes:
                nodes[key] = Sequence([self._work(key)], PASSES[key.kind], (key.kind, key.chunk))
            return nodes[key]

        body: list[Node] = []
        plan = actions_of(self.job, self.rank.index)
        if self.job.recompute.kind != "none" and any(action.kind == "W" for action in plan):
            raise Unsupported(
                f"runs again for each of its weights where {self.job.layout.schedule} halves the backward, and torch keeps what each run "
                "made; this is not modelled",
                key="recompute",
                value=self.job.recompute.kind,
                remedy="it frees nothing there: use none, or another schedule",
            )
        state = _State(closed={index: self._gathers_late(units) for index, units in enumerate(self.units)})
        for times, pattern in compact(plan):
            # the first backward of each chunk makes its accumulated gradients, and a pass may leave parameters otherwise than it finds
            # them: runs in which that changes are written out
            while times:
                before = state.copy()
                one = Sequence([node(self._pass(action, state)) for action in pattern])
                repeats = times if before == state else 1
                body.append(repeated(repeats, one))
                times -= repeats
        late = [self._cast(index, made_before=index in state.made) for index in sorted(state.waiting)]
        return Sequence([self._gather_stage(), *body, *late, self._reduce_stage(), *self._let_go_of_sent(plan)])

    # -- passes

    def _runs(self, kind: Kind, chunk: int) -> Kind:
        """What torch does in a pass: the first stage, which hands no gradient on, does all in its second half."""
        return "B" if kind == "W" and self.rank.chunks[chunk].first else kind

    def _pass(self, action: Action, state: _State) -> _Pass:
        """A forward leaves units that reshard without their parameters, a backward with them."""
        chunk, runs = action.chunk, self._runs(action.kind, action.chunk)
        found = _Pass(
            kind=action.kind,
            chunk=chunk,
            sent_before=chunk in state.sent,
            made_before=chunk in state.made,
            waiting=chunk in state.waiting,
            closed=state.closed[chunk],
        )
        if self.rank.chunks[chunk].first and runs == "I":
            return found
        types = types_of(self.job)
        if runs == "W" and types.compute != types.reduce:
            state.waiting.add(chunk)
        elif runs in ("B", "W") or (runs == "I" and chunk in state.waiting):
            state.made.add(chunk)
            state.waiting.discard(chunk)
        if runs == "B":
            state.sent.add(chunk)
        if runs != "W":
            state.closed[chunk] = runs == "F" and _reshards(self.units[chunk])
        return found

    def _work(self, one: _Pass) -> Node:
        index = one.chunk
        part, runs = self.rank.chunks[index], self._runs(one.kind, index)
        wrap = self._wrap(one, halved=runs in ("I", "W"))
        if runs == "F":
            return self.forward(index, wrap)
        if runs == "W":
            return self._weights(index, wrap)
        if runs == "I" and part.first:
            return EMPTY
        stage = self.stages[index]
        inner = self.backward(index, wrap)
        if wrap.halved:
            rule = self.rule(wrap)
            left = (self.replayer.element_program(element, rule).left for element in self.elements(index))
            inner = Sequence([inner, *drop(item for items in left for item in items)])
        after = [*self._outputs(index), *(drop(self._sent(index)) if one.sent_before and runs == "B" else [])]
        arriving = stage.ahead.stream if part.runs[-1].block.output.grad else 0  # else the steps tell what they take
        if part.last:
            return Sequence([inner, *after])
        buffer = _receive_buffer(round_up(arriving), "output gradient")
        before = [free(buffer), alloc(boundary_grad(arriving))]
        return Sequence([*before, inner, *after, alloc(buffer)])

    def _wrap(self, one: _Pass, *, halved: bool) -> ShardedWrap:
        return ShardedWrap(
            self.units[one.chunk],
            Sync(reduces=False, unsynced_before=one.made_before),
            resident=True,
            closed=one.closed,
            views=self.views(one.chunk),
            halved=halved,
            waiting=one.waiting,
        )

    def _weights(self, index: int, wrap: ShardedWrap) -> Node:
        """The half of a backward that makes the weights' gradients."""
        rule = self.rule(wrap)
        nodes: list[Node] = []
        for element in reversed(self.elements(index)):
            program = self.replayer.element_program(element, rule)
            nodes.append(Sequence([wrap.weights(element, program)], f"weights' gradients of {element.block.name}"))
        types = types_of(self.job)
        return Sequence([*nodes, *([self.root_reduces(index, wrap.whole)] if types.compute == types.reduce else [])])

    def _cast(self, index: int, *, made_before: bool) -> Node:
        """Gradients that no backward has cast are cast as they are reduced."""
        one = _Pass(kind="I", chunk=index, sent_before=True, made_before=made_before, waiting=True, closed=False)
        wrap = self._wrap(one, halved=True)
        rule = self.rule(wrap)
        nodes = [
            node
            for element in reversed(self.elements(index))
            for node in wrap.cast(element, self.replayer.element_program(element, rule))
        ]
        return Sequence([*nodes, self.root_reduces(index, wrap)], "reducing the stage's gradients")

    # -- what a stage hands on

    def _outputs(self, index: int) -> list[Node]:
        """What a chunk hands on, which its frame names to the end of its backward (``backward_one_chunk``): let go."""
        stage, elements = self.stages[index], self.elements(index)
        made = made_for_later(self.replayer.crossings(elements), stage.ahead.slots)
        streams = [boundary(stage.ahead.stream)] if not self.rank.chunks[index].last else []
        streams += [boundary(stream_bytes(one.block.input, self.replayer.context)) for one in losses(elements)]
        return drop([*streams, *(carried(one.bytes, one.slot, one.what) for _, one in made)])

    def _sent(self, index: int) -> list[Item]:
        """The gradients that a chunk sends. The schedule names them until it has those of the next micro-batch (schedules.py,
        ``bwd_sends``), so that one micro-batch's are always there."""
        part = self.rank.chunks[index]
        if part.first:
            return []
        beside = sent_before(self.replayer.crossings(self.elements(index)))
        stream = self.stages[index].behind.stream if part.runs[0].block.input.grad else 0
        return [boundary_grad(stream), *(carried_grad(one.bytes, one.slot) for one in beside)]

    def _let_go_of_sent(self, plan: ListLike[Action]) -> list[Node]:
        """The last gradients that whole backwards sent, and all that halved ones did."""
        counts = Counter((action.kind, action.chunk) for action in plan)
        return [
            free(item, min(1, counts["B", index]) + counts["I", index])
            for index in range(len(self.stages))
            for item in self._sent(index)
        ]

    # -- once a step

    def _gathers_late(self, units: Units) -> bool:
        """Whether units that reshard wait for their first forward; schedules of several chunks gather ahead of it."""
        return len(self.rank.chunks) == 1 and _reshards(units)

    def _gather_stage(self) -> Node:
        """Every group of the rank that is gathered at the start of a step, and once."""
        nodes: list[Node] = []
        for unit, count in self.all_units():
            if unit.reshards and len(self.rank.chunks) == 1:
                continue
            nodes.append(repeated(count, Sequence([*gather(unit), *take(unit.gathered), *drop([unit.staging])])))
        return Sequence(nodes, "gathering the stage's parameters")

    def _reduce_stage(self) -> Node:
        """After the last micro-batch: group after group is reduced and lets its parameters go."""
        nodes: list[Node] = []
        for unit, count in self.all_units():
            one = [
                *drop(unit.gathered),
                *reduce_scatter(unit, list(unit.accumulated), first=True),
                *drop([unit.reduce_input]),
            ]
            nodes.append(repeated(count, Sequence(one)))
        return Sequence(nodes, "reducing the stage's gradients")


def _reshards(units: Units) -> bool:
    return any(unit.reshards for unit in units.of.values())
