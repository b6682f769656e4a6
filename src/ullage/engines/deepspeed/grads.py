"""Gradients that stay whole until the step: made by the first micro-batch's backward, added to by the later ones."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from ullage import dtypes
from ullage.engines.deepspeed.partition import element_params
from ullage.engines.deepspeed.passes import Backward
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


@frozen
class WholeGradients:
    """before: allocated before the first forward (a pipeline's, from the second micro-batch on they are there anyway).
    items: every gradient in model order, with its elements. free: all of them."""

    before: Node
    backward: Backward
    items: tuple[tuple[Item, int], ...]

    @property
    def all(self) -> Node:
        return Sequence([alloc(item) for item, _ in self.items])

    @property
    def free(self) -> Node:
        return Sequence([free(item) for item, _ in self.items])


def whole_gradients(
    job: Job, graph: Graph, rank: Rank, replayer: Replayer, *, dtype: str | None = None, each: bool = False
) -> WholeGradients:
    """dtype: of the gradients, the job's unless given. each: every backward makes them anew."""
    dtype = dtype or job.precision.grads
    keep, add = GradRule(mode="keep", dtype=dtype), GradRule(mode="add")
    early = job.layout.pp > 1 and job.data.grad_accum > 1 and not each
    tied = is_tied_here(graph, rank)

    def backward(elements: ListLike[Element], first: bool) -> Node:
        if not first or early:
            return chunks.backward(elements, replayer, Wrap(), add)
        made_before = [element for element in elements if tied and element.block.role == "embedding"]
        rest = elements[len(made_before) :]
        passes = [chunks.backward(rest, replayer, Wrap(), keep)]
        if made_before:  # the head made the shared weight's gradient: the embedding's is added to it
            passes.append(chunks.backward(made_before, replayer, Wrap(), add))
        return Sequence(passes)

    items = _items(job, rank, replayer, keep, tied)
    before = Sequence([alloc(item) for item, _ in items] if early else [])
    return WholeGradients(before=before, backward=backward, items=items)


def is_tied_here(graph: Graph, rank: Rank) -> bool:
    """Whether embedding and head are one parameter, and both on this rank."""
    return bool(graph.tied) and rank.first and rank.last


def _items(job: Job, rank: Rank, replayer: Replayer, rule: GradRule, tied: bool) -> tuple[tuple[Item, int], ...]:
    """The gradients that the backward keeps, as its own Items, with their elements, in model order: a tied one stands where the
    embedding does."""
    size = dtypes.bits(rule.dtype or "bf16") // 8
    found: list[Item] = []
    for chunk in rank.chunks:
        elements = replayer.elements(chunk)
        for element, params in zip(elements, element_params(job, rank, elements), strict=True):
            kept = dict(replayer.element_program(element, rule).grads)
            each = len(params) // element.size
            names = [name if element.size == 1 else f"{at // each}.{name}" for at, (name, _) in enumerate(params)]
            found += [kept.pop(name) for name in names]
            if tied and element.block.role == "head":
                (found[0],) = kept.values()
    return tuple((item, item.bytes // size) for item in found)
