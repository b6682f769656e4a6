"""Which blocks each pipeline rank runs, and how many micro-batches it has in flight."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from ullage.engines.pipeline import actions_in
from ullage.engines.registry import ranks_of
from ullage.frozen import FrozenMap, frozen, replace
from ullage.job.job import Engine, EngineName, Job, Layout, ScheduleName
from ullage.model.graph import Graph
from ullage.planner.costs import kinds
from ullage.schedule import chunks_in_flight

Counts = tuple[tuple[int, int, bool], ...]
"""A kind of block (planner/costs.py), how many of it, whether they are layers."""


@frozen
class Stage:
    """One pipeline rank. chunks: of each model chunk its blocks, in model order; counts: of all together.

    first_of_kind: whether no rank before it has the same chunks: among equals it has the most in flight.
    """

    index: int
    chunks: tuple[Counts, ...]
    counts: Counts
    both_ends: bool
    first_of_kind: bool


@lru_cache(maxsize=4096)
def stages_of(job: Job, graph: Graph, pp: int, vpp: int, split: tuple[int, ...] | None) -> tuple[Stage, ...]:
    """Every rank of a pipeline of ``pp`` ranks with ``vpp`` chunks each, cut as the job's engine cuts."""
    layout = Layout(pp=pp, vpp=vpp, schedule="interleaved-1f1b" if vpp > 1 else "1f1b", pp_split=split)
    of = kinds(graph)
    found: list[Stage] = []
    seen = set()
    for rank in ranks_of(replace(job, layout=layout), graph):
        parts = tuple(
            tuple((of.index(run.block), run.repeat, run.block.role == "layer") for run in chunk.runs)
            for chunk in rank.chunks
        )
        total: Counter[tuple[int, bool]] = Counter()
        for part in parts:
            for kind, count, layer in part:
                total[kind, layer] += count
        found.append(
            Stage(
                index=rank.index,
                chunks=parts,
                counts=tuple((kind, count, layer) for (kind, layer), count in total.items()),
                both_ends=rank.first and rank.last,
                first_of_kind=parts not in seen,
            )
        )
        seen.add(parts)
    return tuple(found)


Flights = tuple[int, ...]
"""Of each chunk of a rank, its forwards whose backward has not run, when most of the rank's are in flight."""


def flights(job: Job) -> tuple[Flights, ...]:
    """Of every rank."""
    layout, count = job.layout, job.data.grad_accum
    full = 2 * layout.pp  # more micro-batches put no more in flight
    few = count if count <= full or count % layout.pp else full
    return _flights(job.engine.name, job.engine.options, layout.pp, layout.vpp, layout.schedule, few)


@lru_cache(maxsize=4096)
def _flights(
    engine: EngineName, options: FrozenMap, pp: int, vpp: int, schedule: ScheduleName, micro_batches: int
) -> tuple[Flights, ...]:
    layout, with_options = Layout(pp=pp, vpp=vpp, schedule=schedule), Engine(name=engine, options=options)
    return tuple(chunks_in_flight(actions_in(layout, with_options, micro_batches, rank), vpp) for rank in range(pp))
