"""What a model chunk hands to the next: all that was made in front of the cut and is read behind it.

A model that is told by names hands on its stream. A traced one hands on what crosses (trace/crossing.py): torch's pipelining sends a
tuple of tensors, each received in a buffer of its own, and a gradient comes back for each that has one. What more than one stage
reads is handed from stage to stage.
"""

from __future__ import annotations

from functools import lru_cache

from ullage.frozen import frozen
from ullage.job.job import Layout
from ullage.kernels.step import Context, Crossing, Slot
from ullage.memory.chunk import stream_bytes
from ullage.memory.handing import crossings, tensors
from ullage.memory.rank import Chunk, Rank, placed, ranks
from ullage.model.graph import Graph


@frozen
class Border:
    """stream: bytes of the output of the last block in front, which is the input of the first behind. beside: what else crosses."""

    stream: int = 0
    beside: tuple[Crossing, ...] = ()

    @property
    def slots(self) -> frozenset[Slot]:
        return frozenset(one.slot for one in self.beside)

    @property
    def tensors(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        return tuple(size for size in (self.stream, *(one.bytes for one in self.beside)) if size)

    @property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of each tensor for which a gradient comes back."""
        return tuple(size for size in (self.stream, *(one.bytes for one in self.beside if one.grad)) if size)


@frozen
class Stage:
    """The borders of one of a rank's chunks: what it receives and what it hands on."""

    behind: Border = Border()
    ahead: Border = Border()


def stages_of(graph: Graph, layout: Layout, rank: Rank, context: Context) -> tuple[Stage, ...]:
    """Of each of a rank's chunks."""
    if layout.pp * layout.vpp == 1:
        return (Stage(),)
    chunks = {
        stage: chunk
        for one in ranks(graph, layout)
        for stage, chunk in zip(placed(layout, one.index), one.chunks, strict=True)
    }
    found = (Border(), *borders(tuple(chunks[stage] for stage in range(len(chunks))), context))
    return tuple(Stage(behind=found[at], ahead=found[at + 1]) for at in placed(layout, rank.index))


@lru_cache(maxsize=256)
def borders(chunks: tuple[Chunk, ...], context: Context) -> tuple[Border, ...]:
    """Behind each chunk of a model, in model order; behind the last there is nothing to hand on."""
    beside = _beside(chunks, context) if context.stack == "traced" else [[] for _ in chunks]
    streams = [stream_bytes(chunk.runs[-1].block.output, context) for chunk in chunks[:-1]]
    return tuple(
        Border(stream=stream, beside=tuple(found)) for stream, found in zip([*streams, 0], beside, strict=True)
    )


def _beside(chunks: tuple[Chunk, ...], context: Context) -> list[list[Crossing]]:
    blocks = [(at, run.block) for at, chunk in enumerate(chunks) for run in chunk.runs for _ in range(run.repeat)]
    told = [(crossings(block, context), False) for _, block in blocks]
    found: list[list[Crossing]] = [[] for _ in chunks]
    for (maker, name), users in tensors(told):
        readers = [blocks[at][0] for at, known in users if known in told[at][0].read]  # others but name it in a frame
        one = next(one for one in told[maker][0].lends if one.name == name)
        for border in found[blocks[maker][0] : max(readers, default=0)]:
            border.append(one)
    return found
