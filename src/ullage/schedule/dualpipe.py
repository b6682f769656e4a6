"""DualPipe: micro-batches enter from both ends of the pipeline, so that a forward of one direction runs beside a backward of the other.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1, and deepseek-ai/DualPipe, dualpipe.py and dualpipev.py, whose eight steps these are;
torch.distributed.pipelining's ScheduleDualPipeV has the same order. A forward and a backward that run together stand here one
after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from ullage.errors import Infeasible
from ullage.schedule.base import Action, Shape, Word, numbered, passes


def dualpipev(shape: Shape, rank: int) -> Iterator[Action]:
    """Two chunks per rank, down the ranks and back up. In flight: at most 2p + 1 chunks of a micro-batch."""
    shape.must_have(2, "dualpipev")
    if shape.micro_batches < 2 * shape.stages:
        raise Infeasible(
            f"dualpipev on {shape.stages} ranks has too few micro-batches",
            key="micro-batches",
            value=shape.micro_batches,
            allowed=f"{2 * shape.stages} or more",
        )
    return numbered(_words(shape.stages, shape.micro_batches, rank))


def dualpipe(shape: Shape, rank: int) -> Iterator[Action]:
    """Each rank holds a stage for either direction: chunk 0 of the one that starts at rank 0, chunk 1 of the other, whose micro-batches
    are the second half. A rank and its mirror image hold the same two stages. In flight: at most p + 1 of a whole stage."""
    shape.must_have(1, "dualpipe")
    stages, count = shape.stages, shape.micro_batches
    if stages % 2 or count % 2 or count < 2 * stages:
        raise Infeasible(
            f"dualpipe on {stages} ranks takes an even number of ranks and of micro-batches, half of them from either end",
            key="micro-batches",
            value=count,
            allowed=f"an even number from {2 * stages} on, and an even number of ranks",
        )
    mirrored = rank >= stages // 2
    words = _words(stages // 2, count // 2, min(rank, stages - 1 - rank))
    for action in numbered(words):
        chunk = 1 - action.chunk if mirrored else action.chunk
        yield replace(action, chunk=chunk, micro_batch=action.micro_batch + chunk * (count // 2))


def _words(stages: int, micro_batches: int, rank: int) -> Iterator[Word]:
    """Of one rank of a V of ``stages`` ranks. The oldest weights' gradients that wait are made first, of whichever chunk."""
    waiting: deque[int] = deque()

    def half(chunk: int) -> Word:
        waiting.append(chunk)
        return "I", chunk

    def weights() -> Iterator[Word]:
        if waiting:
            yield "W", waiting.popleft()

    behind = stages - 1 - rank
    yield from passes("F0", 2 * behind)
    yield from passes("F0 F1", rank + 1)
    for _ in range(behind):
        yield half(1)
        yield from weights()
        yield "F", 1
    yield from passes("F0 B1 F1 B0", micro_batches - 2 * stages + rank + 1)
    yield from passes("B1 F1 B0", behind)
    halved = False
    for step in range(rank + 1):
        for chunk in (1, 0):  # from the middle on, at the chunk that the rank's parity says, backwards are halved
            halved = halved or (step == (rank + 1) // 2 and chunk == rank % 2)
            yield half(chunk) if halved else ("B", chunk)
    for _ in range(behind):
        yield from weights()
        yield half(0) if halved else ("B", 0)
    for _ in range(rank + 1):
        yield from weights()
