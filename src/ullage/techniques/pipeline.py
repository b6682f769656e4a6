"""Pipeline parallelism: the stages, what they hand on, how many micro-batches are in flight, the bubble, and the step as a Gantt chart.

Sources of the schedules: schedule/, each with its own; of the bubble's share (p - 1) / (m + p - 1): arXiv 2104.04473, section 2.2.
"""

from __future__ import annotations

from ullage.job.job import Job
from ullage.memory.rank import placed
from ullage.schedule import bubble_fraction, in_flight
from ullage.techniques.exchanges import PAYLOAD, SECONDS, part
from ullage.techniques.gantt import Gantt, gantt
from ullage.techniques.rank import OneRank
from ullage.techniques.told import Column, Part, Shown, unused
from ullage.timing.step import Order, order, stages


def told(job: Job, index: int | None) -> Shown:
    if job.layout.pp == 1:
        raise unused("pipeline parallelism", key="layout.pp", value=1, remedy="set layout.pp to 2 or more stages")
    one = OneRank(job, index)
    found = stages(job, one.graph)
    plan = order(job, found)
    chart = gantt(plan, found)
    sends = [transfer for transfer in one.transfers if transfer.exchange.axis == "pp"]
    about = "Point to point, from this stage to its neighbours, once for each micro-batch and model chunk."
    return Shown(
        technique="pipeline",
        job=job,
        stage=one.stage,
        parts=(_stages(one, plan), part("What this stage sends", about, sends), _bubble(one, plan, chart)),
        notes=(PAYLOAD, SECONDS),
        gantt=chart,
    )


def _stages(one: OneRank, plan: Order) -> Part:
    columns = (
        Column(name="stage", head="stage", unit="count"),
        Column(name="layers", head="layers", unit="count", summed=True),
        Column(name="ends", head="beside them"),
        Column(name="parameters", head="parameters", unit="count"),
        Column(name="in_flight", head="in flight", unit="count"),
        Column(name="forward_s", head="forward", unit="seconds"),
        Column(name="backward_s", head="backward", unit="seconds"),
        Column(name="allocated_bytes", head="allocated at its peak", unit="bytes"),
    )
    rows = []
    for stage, actions, held in zip(stages(one.job, one.graph), plan.actions, one.estimate.ranks, strict=True):
        ends = [name for name, there in (("embedding", stage.rank.first), ("head", stage.rank.last)) if there]
        rows.append(
            (
                stage.rank.index,
                sum(chunk.layers for chunk in stage.rank.chunks),
                " and ".join(ends),
                stage.rank.numel(),
                in_flight(actions),
                sum(time.forward_s for time in stage.times),
                sum(time.backward_s for time in stage.times),
                held.allocated_bytes,
            )
        )
    return Part(
        title="Stages",
        about="Parameters of one rank. In flight: forwards of a chunk whose whole backward has not run. Seconds of a micro-batch.",
        columns=columns,
        rows=tuple(rows),
    )


def _bubble(one: OneRank, plan: Order, chart: Gantt) -> Part:
    columns = (
        Column(name="what", head="what"),
        Column(name="share", head="idle", unit="share"),
        Column(name="seconds", head="of these seconds", unit="seconds"),
    )
    ranks = range(len(chart.ranks))
    held = [placed(one.job.layout, rank) for rank in ranks]
    rows = (
        ("this stage", chart.idle_share(one.stage), chart.span_s),
        ("all stages", sum(map(chart.idle_share, ranks)) / len(chart.ranks), chart.span_s),
        (
            "the same schedule, stages of equal time, sends that take none",
            bubble_fraction(plan.actions, stages=held),
            None,
        ),
    )
    return Part(
        title="Bubble",
        about="The share of the passes' time in which a stage waits for its neighbours; reductions and the optimizer come after.",
        columns=columns,
        rows=rows,
    )
