"""Gradients that stay whole until the step: made by the first micro-batch's backward, added to by the later ones."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from ullage import dtypes
from ullage.engines.deepspeed.partition import is_trainable
from ullage.engines.deepspeed.passes import Backward
from ullage.job.job import Job
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free, round_up
from ullage.memory.rank import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGradients:
    """before: allocated before the first forward (a pipeline's, from the second micro-batch on they are there anyway).
    items: every gradient in model order, with its elements. free: all of them."""

    before: Node
    backward: Backward
    items: tuple[tuple[Item, int], ...]

    @property
    def free(self) -> Node:
        return Sequence([free(item) for item, _ in self.items])


def whole_gradients(job: Job, rank: Rank, replayer: Replayer) -> WholeGradients:
    keep = GradRule(mode="keep", dtype=job.precision.grads)
    items = _items(job, rank, replayer, keep)
    early = job.layout.pp > 1 and job.data.grad_accum > 1

    def backward(elements: ListLike[Element], first: bool) -> Node:
        rule = keep if first and not early else GradRule(mode="add")
        return chunks.backward(elements, replayer, Wrap(), rule)

    before = Sequence([alloc(item) for item, _ in items] if early else [])
    return WholeGradients(before=before, backward=backward, items=items)


def _items(job: Job, rank: Rank, replayer: Replayer, rule: GradRule) -> tuple[tuple[Item, int], ...]:
    """The gradients that the backward keeps, as its own Items."""
    size = dtypes.bits(job.precision.grads) // 8
    found: list[tuple[Item, int]] = []
    for chunk in rank.chunks:
        for element in replayer.elements(chunk):
            found += [(item, item.bytes // size) for _, item in replayer.element_program(element, rule).grads]
    return tuple(found)


def gradient_items(job: Job, rank: Rank) -> list[tuple[Item, int]]:
    """Gradients as plain items in model order, where no backward's own Items are needed."""
    by_name = {param.name: param for param in rank.params}
    found = []
    for chunk in rank.chunks:
        for run in chunk.runs:
            for param in run.block.params:
                local = by_name.get(f"{run.block.name}.{param.name}")
                if local is not None and is_trainable(job, local):
                    item = Item(
                        category="gradients",
                        what=f"gradient of {param.name}",
                        bytes=round_up(dtypes.size_bytes(local.numel, job.precision.params)),
                        formula=f"{local.numel} elements ({job.precision.params})",
                    )
                    found.append((item, run.repeat))
    return found
