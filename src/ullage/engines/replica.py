"""A step of training on a whole replica of the model: what single, ddp, zero1 and tensor parallelism alone share.

Forward, the end of its autocast context, backward; micro-batch after micro-batch; then clipping, the optimizer and zero_grad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from ullage.engines import offloaded
from ullage.engines import optimizer as optimizers
from ullage.engines.base import Account, context_of, cublas_workspaces, images, optimizer_of, registered, sized
from ullage.engines.hosted import drops_gradients, hosted
from ullage.engines.optimizer import Group
from ullage.engines.quantised import FROZEN
from ullage.engines.quantised import held as quantised
from ullage.engines.recompute import is_reentrant, stops_early
from ullage.errors import Unsupported
from ullage.hardware import overheads
from ullage.job.adapted import QUANTISED, adapters_type, graph_of, is_adapter, model_type, saved_type
from ullage.job.job import Job
from ullage.kernels import stacks
from ullage.kernels.step import Buffer, Context
from ullage.kernels.transformers_parallel import gradients_of_tokens, whole_gradients
from ullage.memory import chunk as chunks
from ullage.memory.block import BlockProgram, GradRule, boundary, boundary_grad
from ullage.memory.chunk import Element, Replayer, Wrap
from ullage.memory.program import EMPTY, Item, Node, Repeat, Sequence, alloc, free, round_up
from ullage.memory.rank import LocalParam, Rank
from ullage.model.graph import BATCH, TARGET, Block, Graph, Tensor


def refuse(job: Job) -> None:
    """What no replica engine runs here."""
    if job.layout.world > job.layout.dp * job.layout.pp:
        raise Unsupported("is modelled with data parallelism alone", key="engine.name", value=job.engine.name)
    offloaded.refuse(job)


def replayer_of(job: Job, graph: Graph) -> Replayer:
    context = context_of(job, graph)
    return Replayer(
        context=context,
        recompute=job.recompute,
        early_stop=stops_early(job, context),
        reentrant=is_reentrant(job, context),
        inputs=offloaded.inputs(job),
    )


# -- what stays


def parameters(rank: Rank, dtype: str, what: str = "parameters", category: str = "parameters") -> Item:
    """Every parameter as a tensor of its own."""
    return _tensors(rank.params, dtype, what, category)


def _tensors(params: Iterable[LocalParam], dtype: str, what: str, category: str) -> Item:
    pieces = tuple(param.numel for param in params for _ in range(param.copies))
    return sized(category, what, sum(pieces), dtype, pieces=pieces, why=f"{len(pieces)} tensors")


def held_parameters(job: Job, rank: Rank) -> list[Item]:
    """Every parameter in the type that it is kept in: the model's, and adapters beside a frozen one."""
    if job.lora is None:
        return [parameters(rank, job.precision.params)]
    adapters = [param for param in rank.params if is_adapter(param.name)]
    frozen = [param for param in rank.params if not param.param.trainable and param not in adapters]
    in_full = [param for param in rank.params if param.param.trainable and param not in adapters]
    own = [param for param in frozen if param.param.elements not in QUANTISED]
    return [
        _tensors(own, model_type(job), FROZEN, "parameters"),
        *quantised(
            [param for param in frozen if param.param.elements in QUANTISED],
            graph_of(job),
            torchao=job.stack == "torchtune",
        ),
        _tensors(adapters, adapters_type(job), "adapters", "parameters"),
        _tensors(in_full, saved_type(job), "modules trained in full", "parameters"),
    ]


def beside(job: Job, context: Context) -> list[Item]:
    """The batch, the model's buffers and cuBLAS' workspaces."""
    data = job.data
    tokens = data.seq_len * data.micro_batch
    targets = context.numel((BATCH, TARGET)) if TARGET in context.sizes else tokens
    pieces = (tokens, targets, tokens) if data.padding_mask else (tokens, targets)
    cublas = cublas_workspaces(overheads.cublas_workspace_bytes(job.cluster.device))
    batch = "token ids, labels and attention mask" if data.padding_mask else "token ids and labels"
    inputs = sized("input", batch, sum(pieces), "int64", pieces=pieces, lives="one micro-batch")
    return [images(context) or inputs, *registered(context), *cublas]


def master(job: Job, rank: Rank) -> list[Item]:
    """A master copy beside the parameters, where the job asks for one."""
    precision = job.precision
    if precision.master is None or precision.master == precision.params or job.lora is not None:
        return []
    trained = [param for param in rank.params if param.param.trainable]
    return [_tensors(trained, precision.master, "master copy of the parameters", "optimizer")]


# -- the step

_SCALAR = 4
_ROOT = Item(
    category="transient",
    what="gradient of the loss by itself",
    bytes=round_up(_SCALAR),
    formula="one fp32 number, named by loss.backward() to its end, like the loss",
    lives="the backward",
)


def keep(micro_batch: int) -> GradRule:
    """Gradients stay from the first micro-batch on; those of later ones are added to them."""
    return GradRule(mode="keep" if micro_batch == 0 else "add")


def nothing(micro_batch: int) -> Node:
    return Sequence([])


def as_it_is(wrap: Wrap, micro_batch: int) -> Wrap:
    return wrap


@dataclass(kw_only=True)
class ReplicaStep:
    """One optimizer step. rules(micro_batch): what becomes of a weight gradient there, counted from 0.

    groups: what the optimizer steps. after_forward, after_backward(micro_batch): the engine's own end of each. around(wrap, micro_batch):
    what it does around the blocks of a backward.
    keeps: whether gradients are tensors of their own that zero_grad frees.
    """

    job: Job
    graph: Graph
    rank: Rank
    replayer: Replayer
    groups: tuple[Group, ...]
    rules: Callable[[int], GradRule] = keep
    after_forward: Node = EMPTY
    after_backward: Callable[[int], Node] = nothing
    around: Callable[[Wrap, int], Wrap] = as_it_is
    keeps: bool = True

    def program(self) -> Node:
        count = self.job.data.grad_accum
        nodes: list[Node] = [self._micro_batch(0)]
        if count > 2:
            nodes.append(Repeat(count - 2, self._micro_batch(1)))
        if count > 1:
            nodes.append(self._micro_batch(count - 1))
        return Sequence([*nodes, *self._update()])

    @property
    def elements(self) -> list[Element]:
        (part,) = self.rank.chunks
        return self.replayer.elements(part)

    def gradients(self) -> list[tuple[Item, int]]:
        """Every gradient that a backward under GradRule keep leaves, counted; a tied weight's once."""
        rule, tied = replace(self._rule(0), mode="keep", temporaries=()), self.tied
        counts: dict[Item, int] = {}
        for element, same in groupby(self.elements):
            times = len(list(same))
            for name, item in self.replayer.element_program(element, rule).grads:
                if (element.block.name, name) not in tied:
                    counts[item] = counts.get(item, 0) + times
        return list(counts.items())

    @property
    def tied(self) -> dict[tuple[str, str], tuple[str, str]]:
        """(block, weight) -> the (block, weight) of a later block that is the same storage."""
        return self.graph.used_again()

    def _rule(self, number: int) -> GradRule:
        pending = frozenset(weight for pair in self.tied.items() for _, weight in pair)
        return replace(self.rules(number), pending=pending)

    def _micro_batch(self, number: int) -> Node:
        rule = self._rule(number)
        before = self._counted(stacks.left, "its forward to the loss of the next micro-batch")
        forward = [*(alloc(*one) for one in before), *self._forward(rule), *(free(*one) for one in before)]
        backward = [*self._backward(rule, number), self.after_backward(number)]
        return Sequence(
            [
                Sequence([*forward, self.after_forward], "forward", ("F", 0)),
                Sequence(backward, "backward", ("B", 0)),
            ]
        )

    def _forward(self, rule: GradRule) -> list[Node]:
        """Of the rank's part of the model; a first one makes its input, a last one keeps its output."""
        part, elements = self.rank.chunks[0], self.elements
        received = [] if part.first else [alloc(boundary(self._stream_bytes(elements[0].block.input)))]
        sent = [] if part.last else [free(boundary(self._stream_bytes(elements[-1].block.output)))]
        inner = chunks.forward(elements, self.replayer, Wrap(), rule)
        return [*received, inner, chunks.leave_context(elements, self.replayer, rule), *sent]

    def _backward(self, rule: GradRule, number: int) -> list[Node]:
        part, elements = self.rank.chunks[0], self.elements
        named = self._named()
        received: list[Node] = [alloc(boundary_grad(self._stream_bytes(elements[-1].block.output)))]
        end: list[Node] = []
        if part.last:
            received, end = [alloc(_ROOT), alloc(boundary_grad(_SCALAR))], [free(_ROOT), free(boundary(_SCALAR))]
        first = elements[0].block.input
        sent = [] if part.first or not first.grad else [free(boundary_grad(self._stream_bytes(first)))]
        inner = chunks.backward(elements, self.replayer, self._around(rule, number), rule)
        return [*received, *(alloc(*one) for one in named), inner, *sent, *end, *(free(*one) for one in named)]

    def _stream_bytes(self, tensor: Tensor) -> int:
        return chunks.stream_bytes(tensor, self.replayer.context)

    def _named(self) -> list[tuple[Item, int]]:
        return self._counted(stacks.named, "its forward to the next one's")

    def _counted(self, of: Callable[[Block, Context], tuple[Buffer, ...]], lives: str) -> list[tuple[Item, int]]:
        """What every block adds to what outlives its tape, counted."""
        counts: dict[Item, int] = {}
        for element, same in groupby(self.elements):
            found, times = of(element.block, self.replayer.context), len(list(same))
            for one in found * times:
                item = Item(
                    category="activations", what=one.what, bytes=round_up(one.bytes), formula=one.formula, lives=lives
                )
                counts[item] = counts.get(item, 0) + 1
        return list(counts.items())

    def _around(self, rule: GradRule, number: int) -> Wrap:
        return self.around(_Joins(self._twins(rule), rule), number)

    @property
    def host_bytes(self) -> int:
        """Of one rank: what its activations take of the host."""
        return offloaded.host_bytes(self.job, self.replayer.context, self.elements)

    def _twins(self, rule: GradRule) -> dict[tuple[str, str], _Twin]:
        """Of each tied weight."""
        found = {}
        joins_first = {last: first for first, last in self.tied.items()}  # of several, the last in the forward
        joins_last = {last: first for first, last in reversed(self.tied.items())}
        for first, last in self.tied.items():
            block, weight = last
            for element in self.elements:
                if element.block.name == block:
                    program = self.replayer.element_program(element, rule)
                    grads = dict(program.grads)
                    if weight in grads:  # a loss by chunks sums the head's gradient in a buffer of its own
                        is_view = weight in program.views and first == joins_first[last]
                        found[first] = _Twin(grads[weight], is_view, whole=first == joins_last[last])
        return found

    def _update(self) -> list[Node]:
        """Clipping, the optimizer's step, zero_grad(set_to_none=True)."""
        if steps_in_backward(self.job):
            return []
        named = self._named()
        nodes: list[Node] = [alloc(*one) for one in named]
        if self.job.grad_clip and not drops_gradients(self.job):
            nodes.append(optimizers.clip(optimizers.count(self.groups)))
        nodes.append(optimizers.step(self.job.optimizer, hosted(self.job, self.groups).here))
        if self.keeps and not drops_gradients(self.job):
            nodes.append(Sequence([free(item, count) for item, count in self.gradients()], "zero_grad"))
        return [*nodes, *(free(*one) for one in named)]


def plain(job: Job, graph: Graph, rank: Rank, after_forward: Node = EMPTY) -> Account:
    """A replica that nothing wraps: gradients accumulate in ``.grad`` until zero_grad."""
    context = context_of(job, graph)
    dtype = job.precision.master or job.precision.params
    whole = whole_gradients(graph) if context.tp > 1 else ()
    terms = gradients_of_tokens(graph) if context.sp else ()
    groups = optimizers.stepped(rank, context, dtype, whole_gradients=whole, terms=terms)
    parts = hosted(job, groups)
    moments = states(job, parts.here)
    held = [*held_parameters(job, rank), *master(job, rank), *beside(job, context)]
    temporaries = optimizers.temporaries(job.optimizer) if steps_in_backward(job) else ()
    in_backward = GradRule(mode="add", temporaries=temporaries)
    step = ReplicaStep(
        job=job,
        graph=graph,
        rank=rank,
        replayer=replayer_of(job, graph),
        groups=groups,
        after_forward=after_forward,
        rules=(lambda _micro_batch: in_backward) if steps_in_backward(job) or drops_gradients(job) else keep,
    )
    return Account(
        static=(*((item, 1) for item in held if item.bytes), *moments),
        step=step.program(),
        late=tuple(item for item, _ in moments),
        host_bytes=parts.host_bytes + step.host_bytes,
    )


def states(job: Job, groups: tuple[Group, ...]) -> tuple[tuple[Item, int], ...]:
    """The optimizer's states; SGD has momentum where ``engine.options.momentum`` says so (torch's default is 0)."""
    return optimizers.states(optimizer_of(job), groups, momentum=bool(job.engine.options.get("momentum")))


def steps_in_backward(job: Job) -> bool:
    return job.engine.options.get("optimizer_in_bwd") is True


class _Twin(NamedTuple):
    """Of a tied weight the gradient that the last block that uses it left, whether it is a view by then, and whether with this block's
    all are there."""

    gradient: Item
    is_view: bool
    whole: bool


class _Joins(Wrap):
    """A weight that two blocks use: autograd joins both gradients before anybody takes them (its accumulator waits for both)."""

    def __init__(self, twins: dict[tuple[str, str], _Twin], rule: GradRule) -> None:
        self.twins = twins
        self.rule = rule

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        nodes: list[Node] = [program.backward]
        for name, item in program.grads:
            if (element.block.name, name) not in self.twins:
                continue
            first, is_view, whole = self.twins[element.block.name, name]
            nodes += joined(item, first, in_place=not is_view)
            if self.rule.mode != "keep" and whole:
                used = [_as_large(first, dtype, name) for dtype in self.rule.temporaries]
                nodes += [*(alloc(one) for one in used), *(free(one) for one in used), free(first)]
        return Sequence(nodes)


def joined(later: Item, first: Item, *, in_place: bool) -> list[Node]:
    """The gradient of a tied weight's first use is added to that of its second, which autograd made before. in_place: nobody else
    holds that one. A larger one is of tensor parallelism's whole vocabulary, and cut; DTensors are added out of place.
    """
    if later.bytes > first.bytes:
        cut = cut_out(first)
        return [alloc(cut), alloc(first), free(cut), free(first), free(later)]
    return [free(later)] if in_place else [alloc(first), free(first), free(later)]


@lru_cache(maxsize=256)
def cut_out(part: Item) -> Item:
    """What redistributing a whole gradient makes, as large as the gradient of this rank's part."""
    return Item(
        category="transient",
        what=f"{part.what}, cut out of the whole",
        bytes=part.bytes,
        formula=part.formula,
        lives="until it is added or reduced",
    )


def _as_large(gradient: Item, dtype: str, name: str) -> Item:
    """What the optimizer allocates to step one weight (states have the weight's own number of bits or fewer)."""
    return Item(
        category="transient",
        what=f"optimizer step of {name}",
        bytes=gradient.bytes,
        formula=f"{gradient.formula}; {dtype}",
        lives="the optimizer's step inside the backward",
    )
