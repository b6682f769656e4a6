"""Gradients that stay whole until the step: made by the first micro-batch's backward, added to by the later ones."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from ullage import dtypes
from ullage.engines.deepspeed.partition import element_params, gradients_of
from ullage.engines.deepspeed.passes import Backward
from ullage.frozen import frozen, replace
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
    items: every gradient in model order, with its elements. places: of each, among the parameters. free: all of them."""

    before: Node
    backward: Backward
    items: tuple[tuple[Item, int], ...]
    places: tuple[int, ...]

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
    shared = replace(keep, added=_tied_to_the_head(graph))
    early = job.layout.pp > 1 and job.data.grad_accum > 1 and not each
    tied = is_tied_here(graph, rank)

    def backward(elements: ListLike[Element], first: bool) -> Node:
        if not first or early:
            return chunks.backward(elements, replayer, Wrap(), add)
        made_before = [element for element in elements if tied and element.block.role == "embedding"]
        rest = elements[len(made_before) :]
        passes = [chunks.backward(rest, replayer, Wrap(), keep)]
        if made_before:  # the head made the shared weight's gradient: the embedding's is added to it
            passes.append(chunks.backward(made_before, replayer, Wrap(), shared))
        return Sequence(passes)

    found = _items(job, rank, replayer, keep, tied)
    items = tuple((item, item.bytes // dtypes.size_bytes(1, dtype)) for _, item in found)
    before = Sequence([alloc(item) for item, _ in items] if early else [])
    return WholeGradients(before=before, backward=backward, items=items, places=tuple(place for place, _ in found))


def _tied_to_the_head(graph: Graph) -> frozenset[str]:
    """Parameters of the embedding that the head is, where they have a gradient: beside adapters they are frozen."""
    tied = {name for pair in graph.tied for name in pair}
    blocks = [run.block for run in graph.runs if run.block.role == "embedding"]
    return frozenset(
        param.name
        for block in blocks
        for param in block.params
        if param.trainable and f"{block.name}.{param.name}" in tied
    )


def is_tied_here(graph: Graph, rank: Rank) -> bool:
    """Whether embedding and head are one parameter that is trained, and both on this rank."""
    return bool(_tied_to_the_head(graph)) and rank.first and rank.last


def _items(job: Job, rank: Rank, replayer: Replayer, rule: GradRule, tied: bool) -> list[tuple[int, Item]]:
    """The gradients that the backward keeps, as its own Items, in model order, each with its parameter's place; a tied one stands where
    the embedding does."""
    found: dict[int, Item] = {}
    place = 0
    for chunk in rank.chunks:
        elements = replayer.elements(chunk)
        for element, params in zip(elements, element_params(job, rank, elements), strict=True):
            kept = dict(replayer.element_program(element, rule).grads)
            each = len(params) // element.size
            alone = frozenset(name.partition(".")[2] for name in kept) if element.size > 1 else frozenset(kept)
            for turn in range(element.size):
                for name, (first, _) in gradients_of(element.block, params[:each], alone).items():
                    one = kept.pop(name if element.size == 1 else f"{turn}.{name}", None)
                    if one is not None:  # the account of Megatron's router makes none
                        found[place + turn * each + first] = one
            place += len(params)
            if tied and element.block.role == "head":
                (found[0],) = kept.values()
    return sorted(found.items())
