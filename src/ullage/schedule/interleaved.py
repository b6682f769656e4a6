"""Interleaved 1F1B: each rank holds several model chunks and runs a group of micro-batches through one before the next.

Source: Megatron-LM core/pipeline_parallel/schedules.py, get_schedule_table, get_pp_rank_microbatches and
forward_backward_pipelining_with_interleaving. torch's ScheduleInterleaved1F1B is the same with another group size.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.errors import Infeasible
from ullage.schedule.base import Action, Shape


def interleaved(shape: Shape, rank: int) -> Iterator[Action]:
    """In flight at the peak: min(v*m, (v-1)*G + 2*(p-1-r) + 1), for v chunks, m micro-batches, group G, p stages."""
    group = _group_size(shape)
    order = [
        (chunk, micro_batch)
        for first in range(0, shape.micro_batches, group)
        for chunk in range(shape.chunks)
        for micro_batch in range(first, min(first + group, shape.micro_batches))
    ]
    warm_up = min(len(order), (shape.chunks - 1) * group + 2 * (shape.stages - 1 - rank))
    for chunk, micro_batch in order[:warm_up]:
        yield Action("F", chunk, micro_batch)
    for step, (chunk, micro_batch) in enumerate(order):
        if step + warm_up < len(order):
            yield Action("F", *order[step + warm_up])
        yield Action("B", shape.chunks - 1 - chunk, micro_batch)


def torch_group_size(stages: int, micro_batches: int) -> int:
    """The group of torch's ScheduleInterleaved1F1B: equal rounds, as many as the stages go into the micro-batches."""
    rounds = max(1, micro_batches // stages)
    if micro_batches % rounds:
        raise Infeasible(
            f"torch's interleaved schedule makes {rounds} equal rounds of the micro-batches",
            key="micro-batches",
            value=micro_batches,
            allowed=f"a multiple of {rounds}",
        )
    return micro_batches // rounds


def _group_size(shape: Shape) -> int:
    """Megatron's microbatch_group_size_per_vp_stage, by default the number of stages, under Megatron's own conditions.

    One group of all micro-batches may be smaller than the pipeline, as torch allows.
    """
    group = shape.stages if shape.group_size is None else shape.group_size
    if group > shape.micro_batches or (group < shape.stages and group != shape.micro_batches):
        raise Infeasible(
            "the interleaved schedule has no such group of micro-batches",
            key="group size",
            value=group,
            allowed=f"{shape.stages} (stages) to {shape.micro_batches} (micro-batches)",
            remedy="use more micro-batches, or 1f1b",
        )
    rest = shape.micro_batches % group
    if 0 < rest < shape.stages:
        raise Infeasible(
            f"the last group of {group} has {rest} micro-batches, fewer than the {shape.stages} stages",
            key="micro-batches",
            value=shape.micro_batches,
            remedy=f"use a multiple of {group}",
        )
    return group
