"""1F1B: after a short warm-up each forward is followed by the backward that frees an earlier one.

Source: Megatron-LM core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving; the torch
runtime (Schedule1F1B) does the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.errors import InvalidInput
from ullage.schedule.base import Action, Shape


def one_f_one_b(shape: Shape, rank: int) -> Iterator[Action]:
    """In flight at the peak: min(micro-batches, stages - rank)."""
    if shape.chunks != 1:
        raise InvalidInput(
            "1f1b has one model chunk per rank", key="layout.vpp", value=shape.chunks, remedy="use interleaved-1f1b"
        )
    warm_up = min(shape.micro_batches, shape.stages - 1 - rank)
    for forward in range(warm_up):
        yield Action("F", 0, forward)
    for backward in range(shape.micro_batches):
        if (forward := backward + warm_up) < shape.micro_batches:
            yield Action("F", 0, forward)
        yield Action("B", 0, backward)
