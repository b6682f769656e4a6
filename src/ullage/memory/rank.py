"""What one pipeline rank holds: its model chunks, each a list of runs of blocks, cut as the job says."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import field
from functools import lru_cache

from ullage.errors import Infeasible
from ullage.frozen import frozen, hash_once
from ullage.job.bind import is_expert, local_numel
from ullage.job.job import Layout
from ullage.model.graph import Block, Graph, Param, Run
from ullage.schedule import stages_on


@frozen
class LocalParam:
    """A parameter on this rank: qualified name, elements after tensor and expert parallelism, and how many blocks hold it."""

    name: str
    numel: int
    copies: int
    expert: bool
    param: Param
    block: Block

    @property
    def total(self) -> int:
        return self.numel * self.copies


@frozen
class Chunk:
    """One model chunk: what a pipeline rank runs in one forward. Without pipeline: the whole model."""

    runs: tuple[Run, ...]
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        return sum(run.repeat for run in self.runs if run.block.role == "layer")


@frozen
class Rank:
    """One pipeline rank and its chunks (one per virtual stage)."""

    index: int
    chunks: tuple[Chunk, ...]
    params: tuple[LocalParam, ...]
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.index, self.chunks, self.params)

    @property
    def first(self) -> bool:
        return any(chunk.first for chunk in self.chunks)

    @property
    def last(self) -> bool:
        return any(chunk.last for chunk in self.chunks)

    def numel(self, *, expert: bool | None = None) -> int:
        """Elements of the parameters here; of experts alone or of all others if asked."""
        return sum(param.total for param in self.params if expert is None or param.expert == expert)


def placed(layout: Layout, rank: int) -> tuple[int, ...]:
    """The stages of the model that a pipeline rank holds, one for each of its chunks."""
    return stages_on(layout.schedule, rank, pp=layout.pp, vpp=layout.vpp)


@lru_cache(maxsize=256)
def ranks(graph: Graph, layout: Layout) -> tuple[Rank, ...]:
    """Every pipeline rank of a layout."""
    chunks = _chunks(graph, layout)
    built = []
    known: dict[object, tuple[LocalParam, ...]] = {}  # inner ranks have the same
    for index in range(layout.pp):
        mine = tuple(chunks[stage] for stage in placed(layout, index))
        key = tuple([(id(run.block), run.repeat) for chunk in mine for run in chunk.runs])
        if key not in known:
            known[key] = _params(graph, layout, mine)
        built.append(Rank(index=index, chunks=mine, params=known[key]))
    return tuple(built)


def _chunks(graph: Graph, layout: Layout) -> list[Chunk]:
    split = layers_per_chunk(graph.layers, layout)
    before = [run for run in graph.runs if run.block.role == "embedding"]
    after = [run for run in graph.runs if run.block.role in ("head", "loss")]
    layers = [run for run in graph.runs if run.block.role not in ("embedding", "head", "loss")]
    chunks = []
    start = 0
    for number, count in enumerate(split):
        first, last = number == 0, number == len(split) - 1
        runs = _slice(layers, start, start + count)
        start += count
        if first:
            runs = [*before, *runs]
        if last:
            runs = [*runs, *after]
        chunks.append(Chunk(runs=tuple(runs), first=first, last=last))
    return chunks


def layers_per_chunk(layers: int, layout: Layout) -> list[int]:
    """Layers of each virtual stage, in model order."""
    stages = layout.pp * layout.vpp
    split = layout.pp_split
    if split is None:
        if layers % stages and stages > 1:
            return [layers * (i + 1) // stages - layers * i // stages for i in range(stages)]
        return [layers // stages] * stages
    if len(split) == stages:
        return list(split)
    if len(split) == layout.pp:
        found = [0] * stages
        for rank, mine in enumerate(split):
            where = placed(layout, rank)
            sizes = _over_chunks(mine, layout.vpp, first=0 in where, last=stages - 1 in where)
            for stage, size in zip(where, sizes, strict=True):
                found[stage] = size
        return found
    raise Infeasible(
        "has the wrong length", key="layout.pp_split", value=list(split), allowed=f"{layout.pp} or {stages} entries"
    )


def _over_chunks(layers: int, chunks: int, *, first: bool, last: bool) -> list[int]:
    """A rank's layers over its chunks. What is missing of even chunks is missing beside the embedding, or the head and the loss, where the
    rank has one of them: so do Megatron's --account-for-embedding-in-pipeline-split and published layouts have it."""
    each = -(-layers // chunks)
    if first != last and each * (chunks - 1) <= layers:
        short = [layers - each * (chunks - 1)]
        whole = [each] * (chunks - 1)
        return [*short, *whole] if first else [*whole, *short]
    return [layers * (chunk + 1) // chunks - layers * chunk // chunks for chunk in range(chunks)]


def _slice(runs: ListLike[Run], start: int, stop: int) -> list[Run]:
    cut = []
    at = 0
    for run in runs:
        if run.block.role == "between":  # goes with the layer before it
            cut += [run] if start < at <= stop else []
            continue
        count = min(stop, at + run.repeat) - max(start, at)
        if count > 0:
            cut.append(Run(block=run.block, repeat=count))
        at += run.repeat
    return cut


def _params(graph: Graph, layout: Layout, chunks: ListLike[Chunk]) -> tuple[LocalParam, ...]:
    """Parameters of some chunks, equal blocks summed; a tied parameter once if both its places are here."""
    here: dict[str, LocalParam] = {}
    for chunk in chunks:
        for run in chunk.runs:
            for param in run.block.params:
                if param.buffer:
                    continue
                name = f"{run.block.name}.{param.name}"
                copies = run.repeat + (here[name].copies if name in here else 0)
                here[name] = LocalParam(
                    name=name,
                    numel=local_numel(graph, param, layout),
                    copies=copies,
                    expert=is_expert(param),
                    param=param,
                    block=run.block,
                )
    for kept, shared in graph.tied:
        if kept in here and shared in here:
            del here[shared]
    return tuple(here.values())
