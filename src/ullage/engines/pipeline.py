"""A step's forwards and backwards in the order of the pipeline's schedule, folded."""

from __future__ import annotations

from collections.abc import Callable

from ullage.job.job import Layout
from ullage.memory.program import Node, Repeat, Sequence
from ullage.schedule import Action, actions, compact

ChunkNode = Callable[[int], Node]
"""The program of one micro-batch through model chunk c."""


def scheduled(
    layout: Layout,
    rank: int,
    micro_batches: int,
    forward: ChunkNode,
    backward: ChunkNode,
    *,
    group_size: int | None = None,
) -> Node:
    """Every forward and backward of a rank in order, runs of equal patterns folded."""
    plan = actions(
        layout.schedule if layout.pp > 1 else "1f1b",
        stages=layout.pp,
        rank=rank,
        micro_batches=micro_batches,
        chunks=layout.vpp,
        group_size=group_size,
    )
    forwards = [Sequence([forward(chunk)], "forward", ("F", chunk)) for chunk in range(layout.vpp)]
    backwards = [Sequence([backward(chunk)], "backward", ("B", chunk)) for chunk in range(layout.vpp)]

    def node(action: Action) -> Node:
        return forwards[action.chunk] if action.kind == "F" else backwards[action.chunk]

    runs = []
    for times, pattern in compact(plan):
        body = node(pattern[0]) if len(pattern) == 1 else Sequence([node(action) for action in pattern])
        runs.append(Repeat(times, body) if times > 1 else body)
    return Sequence(runs)
