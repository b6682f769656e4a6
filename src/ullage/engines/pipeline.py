"""A step's forwards and backwards in the order of the pipeline's schedule, folded."""

from __future__ import annotations

from collections.abc import Callable

from ullage.job.checks_pipeline import GROUP_OPTIONS
from ullage.job.job import Engine, Job, Layout
from ullage.memory.program import Node, Repeat, Sequence
from ullage.schedule import Action, actions, compact, torch_group_size
from ullage.schedule.base import Kind
from ullage.schedule.placement import BOTH_WAYS


def actions_of(job: Job, rank: int) -> tuple[Action, ...]:
    """What a pipeline rank does in one optimizer step, in order."""
    return actions_in(job.layout, job.engine, job.data.grad_accum, rank)


def actions_in(layout: Layout, engine: Engine, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """What a pipeline rank does in one optimizer step, in order, as the engine groups its micro-batches."""
    return actions(
        layout.schedule if layout.pp > 1 else "1f1b",
        stages=layout.pp,
        rank=rank,
        micro_batches=micro_batches,
        chunks=layout.vpp,
        group_size=_group_size(layout, engine, micro_batches),
    )


def micro_batches_of_chunk(job: Job) -> int:
    """How many micro-batches of a step run through each of a rank's chunks: under DualPipe every other one."""
    count = job.data.grad_accum
    return count // 2 if job.layout.schedule == BOTH_WAYS and job.layout.pp > 1 else count


def _group_size(layout: Layout, engine: Engine, micro_batches: int) -> int | None:
    if layout.schedule != "interleaved-1f1b":
        return None
    if engine.name == "fsdp2":
        return torch_group_size(layout.pp, micro_batches)
    found = (engine.options.get(name) for name in GROUP_OPTIONS)
    return next((group for group in found if isinstance(group, int)), None)


def takes_turns(job: Job) -> bool:
    """Whether a rank's chunks take turns after as many micro-batches as there are ranks, in groups that come out even."""
    layout, micro_batches = job.layout, job.data.grad_accum
    if layout.schedule != "interleaved-1f1b" or layout.vpp == 1 or micro_batches % layout.pp:
        return False
    return _group_size(layout, job.engine, micro_batches) in (None, layout.pp)


PASSES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "backward", "W": "weights' gradients"}
"""Moments of a step, by the pass that it is in."""

PassNode = Callable[[Kind, int], Node]
"""The program of one micro-batch's pass through model chunk c."""


def scheduled(job: Job, rank: int, program: PassNode) -> Node:
    """Every pass of a rank in order, runs of equal patterns folded."""
    nodes: dict[tuple[Kind, int], Node] = {}

    def node(action: Action) -> Node:
        kind, chunk = action.kind, action.chunk
        if (kind, chunk) not in nodes:
            nodes[kind, chunk] = Sequence([program(kind, chunk)], PASSES[kind], (kind, chunk))
        return nodes[kind, chunk]

    runs = []
    for times, pattern in compact(actions_of(job, rank)):
        body = node(pattern[0]) if len(pattern) == 1 else Sequence([node(action) for action in pattern])
        runs.append(Repeat(times, body) if times > 1 else body)
    return Sequence(runs)
