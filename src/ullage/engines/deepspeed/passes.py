"""Forwards and backwards of one optimizer step: plain, or by DeepSpeed's pipeline engine, which keeps buffers of its own.

Sources: deepspeed/runtime/pipe/engine.py (_exec_forward_pass, _exec_recv_activations, _exec_recv_grads, _exec_backward_pass) and
pipe/schedule.py (TrainSchedule.num_pipe_buffers: at least two), as of 2022 and today alike.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from functools import cache

from ullage.engines.pipeline import scheduled
from ullage.errors import Unsupported
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.kernels.step import Buffer, Context
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule, boundary, boundary_grad
from ullage.memory.chunk import Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, free, round_up
from ullage.memory.rank import Chunk, Rank
from ullage.model.graph import BATCH, SEQ, STREAM
from ullage.schedule.base import Kind

Forward = Callable[[ListLike[Element]], Node]
Backward = Callable[[ListLike[Element], bool], Node]
"""The backward of a chunk's elements (in model order); True for the first micro-batch of a step."""

PIPE_BUFFERS = 2
"""The least number of micro-batches for which the pipeline engine has slots (TrainSchedule.num_pipe_buffers)."""


def uses_pipeline_engine(job: Job) -> bool:
    """Pipelines; and Megatron-DeepSpeed without ZeRO-2 or 3, whose GPTModelPipe is a pipeline of one stage at pp 1 too."""
    return job.layout.pp > 1 or (job.stack == "megatron" and job.engine.zero_stage < 2)


@frozen
class Passes:
    job: Job
    rank: Rank
    replayer: Replayer
    forward: Forward
    backward: Backward
    forward_again: Forward | None = None

    def all_micro_batches(self) -> Node:
        """Every micro-batch of a step in the schedule's order. In a pipeline gradients count as there from the first on."""
        micro_batches = self.job.data.grad_accum
        if self.job.layout.pp == 1 and self.job.layout.vpp == 1:
            first = Sequence([self._scoped("F", 0, self.forward), self._scoped("B", 0, None, first=True)])
            if micro_batches == 1:
                return first
            again = self.forward_again or self.forward
            later = Sequence([self._scoped("F", 0, again), self._scoped("B", 0, None, first=False)])
            return Sequence([first, Repeat(micro_batches - 1, later)])
        once = micro_batches == 1

        def program(kind: Kind, index: int) -> Node:
            if kind not in ("F", "B"):
                raise Unsupported(
                    "is no schedule of DeepSpeed's pipelines", key="layout.schedule", value=self.job.layout.schedule
                )
            return self._forward(index, self.forward) if kind == "F" else self._backward(index, once)

        return scheduled(self.job, self.rank.index, program)

    def _scoped(self, kind: str, index: int, forward: Forward | None, *, first: bool = False) -> Node:
        if forward is not None:
            return Sequence([self._forward(index, forward)], "forward", (kind, index))
        return Sequence([self._backward(index, first)], "backward", (kind, index))

    def _forward(self, index: int, forward: Forward) -> Node:
        part = self.rank.chunks[index]
        pipe = _Pipe(self.job, self.replayer.context, part)
        elements = self.replayer.elements(part)
        leave = chunks.leave_context(elements, self.replayer, GradRule())
        return Sequence([*pipe.before_forward(), forward(elements), leave, *pipe.after_forward()])

    def _backward(self, index: int, first: bool) -> Node:
        part = self.rank.chunks[index]
        pipe = _Pipe(self.job, self.replayer.context, part)
        inner = self.backward(self.replayer.elements(part), first)
        return Sequence([*pipe.before_backward(), inner, *pipe.after_backward()])


class _Pipe:
    """What happens at the ends of a stage. With tensor parallelism the tensors between stages travel in slices."""

    def __init__(self, job: Job, context: Context, part: Chunk) -> None:
        stream = context.buffer("stream", STREAM) if uses_pipeline_engine(job) else Buffer("stream", 0)
        self.part = part
        self.engine = uses_pipeline_engine(job)
        self.sliced = context.tp > 1
        self.received, self.sent_grad = boundary(stream.bytes), boundary_grad(stream.bytes)
        self.loss, self.loss_grad = boundary(4), boundary_grad(4)
        self.copy = _held(
            "copy of the stage's input", stream.bytes, stream.formula, "a micro-batch's forward to its gradient's send"
        )
        self.slice = _held(
            "slice of the stage's output that was sent",
            stream.bytes // context.tp,
            f"{stream.formula} / tp {context.tp}",
            "a micro-batch's forward to its backward",
        )
        self.outputs = stale_outputs(job, context)

    def before_forward(self) -> list[Node]:
        if self.part.first:
            return []
        return [alloc(self.received)] if self.sliced else [alloc(self.copy), alloc(self.received)]

    def after_forward(self) -> list[Node]:
        if self.part.last:
            return [free(self.outputs)] if self.engine else []
        return [alloc(self.slice), free(self.received)] if self.sliced else []

    def before_backward(self) -> list[Node]:
        if self.part.last:
            return [free(self.loss), alloc(self.loss_grad)]
        if self.sliced:
            return [alloc(self.received), alloc(self.sent_grad)]
        return [alloc(self.sent_grad)]

    def after_backward(self) -> list[Node]:
        nodes: list[Node] = []
        if self.part.last:
            nodes += [alloc(self.outputs)] if self.engine else []
        else:
            nodes += [free(self.received), free(self.slice)] if self.sliced else [free(self.received)]
        if not self.part.first:
            nodes += [free(self.sent_grad)] if self.sliced else [free(self.sent_grad), free(self.copy)]
        return nodes


def stale_outputs(job: Job, context: Context) -> Item:
    """The last stage's output, which its slot holds until the next micro-batch in that slot has run: the whole logits.

    Megatron-DeepSpeed's last layer turns them into fp32, in which the cross entropy works in place.
    """
    if "vocab" not in context.sizes:
        return _held("output of the last stage, kept in its slot", 0, "", "")
    logits = context.buffer("logits", (BATCH, SEQ, "vocab"), "fp32" if job.stack == "megatron" else None)
    what = "logits of an earlier micro-batch, kept in their slot"
    return _held(what, logits.bytes, logits.formula, "until the next micro-batch in that slot has run")


@cache
def _held(what: str, n_bytes: int, formula: str, lives: str) -> Item:
    """One object for one line of the ledger, so that a free finds its allocation."""
    return Item(category="activations", what=what, bytes=round_up(n_bytes), formula=formula, lives=lives)


def pipeline_buffers(job: Job, rank: Rank, context: Context) -> list[tuple[Item, int]]:
    """What the pipeline engine holds all the time: receive buffers, and the last stage's outputs in its slots."""
    if not uses_pipeline_engine(job):
        return []
    stream = context.buffer("stream", STREAM)
    share = round_up(stream.bytes // context.tp)
    formula = f"{stream.formula}{f' / tp {context.tp}' if context.tp > 1 else ''}"
    found = []
    if not rank.first:
        what = "receive buffer of the pipeline (activations)"
        found.append((Item(category="communication", what=what, bytes=share, formula=formula), 1))
    if not rank.last:
        what = "receive buffer of the pipeline (gradients)"
        found.append((Item(category="communication", what=what, bytes=share, formula=formula), 1))
    if rank.last and job.data.grad_accum >= PIPE_BUFFERS:
        found.append((stale_outputs(job, context), PIPE_BUFFERS))
    elif rank.last:
        found.append((stale_outputs(job, context), 1))
    return found


def plain_forward(replayer: Replayer) -> Forward:
    return lambda elements: chunks.forward(elements, replayer, Wrap(), GradRule(mode="add"))
