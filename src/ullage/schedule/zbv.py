"""ZB-V: two chunks per rank, down the ranks and back up, with no bubble where a forward takes as long as each half of a backward.

Source: Qi et al., arXiv 2401.10241, section 6; torch.distributed.pipelining's ScheduleZBVZeroBubble has the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.schedule.base import Action, Shape, Word, numbered, passes


def zbv(shape: Shape, rank: int) -> Iterator[Action]:
    """In flight until their weights' gradients are made: 2p chunks of a micro-batch, as much as 1F1B's p of a whole stage."""
    shape.must_have(2, "zbv")
    return (one for one in numbered(_words(shape, rank)) if one.micro_batch < shape.micro_batches)


def _words(shape: Shape, rank: int) -> Iterator[Word]:
    """Of as many micro-batches as fill the pipeline, at least; those beyond the job's are left out."""
    stages = shape.stages
    count = max(2 * stages - 1, shape.micro_batches)
    down = 2 * stages - 1 - rank  # forwards of the first chunk in the warm-up
    yield from passes("F0", down - rank)
    yield from passes("F1 F0", rank)
    yield from passes("F1 I1 W1", stages - rank)
    for step in range(count - stages):
        if down + step < count:
            yield "F", 0
        yield from passes("I0 W0 F1 I1 W1")
    yield from passes("I0 I1", rank)
    yield from passes("I0 W0", stages - rank)
    yield from passes("W1", rank)
    yield from passes("W0", rank)
