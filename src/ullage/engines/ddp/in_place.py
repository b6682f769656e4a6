"""Gradients that are reduced where autograd made them, without a reducer's buckets: ``reduce_in_place``, which ullage's own trainer has.

Source: ullage/trace/replicas.py. Large gradients are reduced where they lie; a block's small ones are put together first, and are views
of that tensor from then on.
"""

from __future__ import annotations

from ullage.memory.block import BlockProgram
from ullage.memory.chunk import Element, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.units import MIB

ALONE_BYTES = MIB
"""What makes an exchange of its own: as much as DDP's first bucket waits for (dist._DEFAULT_FIRST_BUCKET_BYTES)."""


class PutTogether(Wrap):
    """After a block's last backward. tied: (block, weight) whose gradient is another block's."""

    def __init__(self, inner: Wrap, tied: frozenset[tuple[str, str]]) -> None:
        self.inner = inner
        self.tied = tied

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        inner = self.inner.backward(element, program, previous, following)
        mine = [item for name, item in program.grads if (element.block.name, name) not in self.tied]
        small = [item.bytes for item in mine if item.bytes < ALONE_BYTES]
        if len(small) < 2:
            return inner
        together = Item(
            category="gradients",
            what=f"small gradients of {element.block.name} put together",
            bytes=sum(small),
            formula=f"{len(small)} gradients of less than 1 MiB",
            lives="until they are views of it",
        )
        return Sequence([inner, alloc(together), free(together)])
