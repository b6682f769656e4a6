"""Inputs of checkpointed blocks that wait on the host: torchtune's ``OffloadActivations``, which TRL and axolotl have too.

Source: torchtune training/_activation_offloading.py, trl models/activation_offloading.py (its pack and unpack hooks).
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from ullage.engines.base import pinned
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory import chunk as chunks
from ullage.memory.block import BlockProgram, boundary
from ullage.memory.chunk import CHECKPOINT, Element, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free


def refuse(job: Job) -> None:
    """What is not modelled of a job whose activations go to the host."""
    if job.offload.activations == "none":
        return
    if job.recompute.kind != "full":
        raise Unsupported(
            "is modelled for checkpointed layers alone",
            key="offload.activations",
            value=job.offload.activations,
            remedy="set recompute: full",
        )
    if job.layout.pp > 1:  # stages are handed their input in buffers that stay
        raise Unsupported(
            "is not modelled in a pipeline",
            key="offload.activations",
            value=job.offload.activations,
            remedy="set pp: 1",
        )


def around(job: Job, context: Context, wrap: Wrap) -> Wrap:
    """What an engine does around its blocks, with their inputs on the host where the job says so."""
    return wrap if job.offload.activations == "none" else _OffloadedInputs(context, wrap)


def host_bytes(job: Job, context: Context, elements: ListLike[Element]) -> int:
    """Of one rank: a pinned block for the input of every checkpoint of a micro-batch."""
    if job.offload.activations == "none":
        return 0
    return sum(pinned(size) for element in elements if (size := _input_bytes(element, context)))


def _input_bytes(element: Element, context: Context) -> int:
    return chunks.stream_bytes(element.block.input, context) if element.mode == CHECKPOINT else 0


class _OffloadedInputs(Wrap):
    """Gone after the forward, brought back for the backward. The last five tensors that a forward saved stay for the copy's sake
    (max_fwd_stash_size); they are the head's."""

    def __init__(self, context: Context, inner: Wrap) -> None:
        self.context = context
        self.inner = inner

    def _moved(self, element: Element) -> Item | None:
        n_bytes = _input_bytes(element, self.context)
        return boundary(n_bytes) if n_bytes else None

    def forward(self, element: Element, node: Node, previous: Element | None, following: Element | None) -> Node:
        moved = self._moved(element)
        inner = self.inner.forward(element, node, previous, following)
        return inner if moved is None else Sequence([inner, free(moved)])

    def backward(
        self, element: Element, program: BlockProgram, previous: Element | None, following: Element | None
    ) -> Node:
        moved = self._moved(element)
        inner = self.inner.backward(element, program, previous, following)
        return inner if moved is None else Sequence([alloc(moved), inner])
