"""Activation checkpointing: what a layer keeps for its backward without and with it, what runs again, and what that costs.

Sources: arXiv 1604.06174 (checkpoints), arXiv 2205.05198 (selective).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ullage.job.job import Job, Recompute
from ullage.memory.block import GradRule
from ullage.memory.chunk import CHECKPOINT, PLAIN, SELECTIVE, Element, Replayer
from ullage.memory.ledger import by_category
from ullage.techniques.exchanges import SECONDS
from ullage.techniques.rank import OneRank
from ullage.techniques.told import Column, Part, Shown, Value, unused
from ullage.timing.blocks import pass_parts
from ullage.timing.ops import block_work
from ullage.timing.stage import Stage
from ullage.timing.step import step_time
from ullage.timing.work import OpWork, Pass

_MODES = {PLAIN: "keeps all", CHECKPOINT: "keeps its input", SELECTIVE: "keeps what the policy says"}


def told(job: Job, index: int | None) -> Shown:
    if job.recompute.kind == "none":
        raise unused("checkpointing", key="recompute", value="none", remedy="set recompute to full or selective")
    one = OneRank(job, index)
    without = OneRank(replace(job, recompute=Recompute()), one.stage)
    return Shown(
        technique="checkpointing",
        job=job,
        stage=one.stage,
        parts=(_kept(one.timed), _again(one.timed), _cost(one, without)),
        notes=(SECONDS,),
    )


def _elements(stage: Stage) -> Counter[Element]:
    return Counter(element for elements in stage.elements for element in elements)


def _kept(stage: Stage) -> Part:
    """The rise of what is live from before a block's forward to after it, by the estimate's own program of it."""
    replayer = Replayer(context=stage.context, recompute=stage.job.recompute)
    columns = (
        Column(name="block", head="block"),
        Column(name="how", head="how"),
        Column(name="layers", head="under one", unit="count"),
        Column(name="count", head="on this rank", unit="count"),
        Column(name="kept_without_bytes", head="kept without", unit="bytes"),
        Column(name="kept_bytes", head="kept with it", unit="bytes"),
    )
    rows = []
    for element, count in _elements(stage).items():
        if element.block.role != "layer":
            continue
        plain = replayer.element_program(replace(element, mode=PLAIN, size=1), GradRule()).forward.delta_bytes
        kept = replayer.element_program(element, GradRule()).forward.delta_bytes
        rows.append((element.block.name, _MODES[element.mode], element.size, count, element.size * plain, kept))
    return Part(
        title="What a layer keeps for its backward",
        about="Of one micro-batch, the layer's output included. Under one: layers that one checkpoint covers.",
        columns=columns,
        rows=tuple(rows),
    )


def _again(stage: Stage) -> Part:
    columns = (
        Column(name="block", head="block"),
        Column(name="op", head="op"),
        Column(name="module", head="module"),
        Column(name="count", head="times a step", unit="count"),
        Column(name="flops", head="FLOPs each", unit="flops"),
        Column(name="moved_bytes", head="moved through memory", unit="bytes"),
        Column(name="seconds", head="a step", unit="seconds", summed=True),
    )
    counts: Counter[tuple[str, OpWork]] = Counter()
    for element, count in _elements(stage).items():
        for work in stage.again(element):
            counts[element.block.name, work] += count * element.size * stage.job.data.grad_accum
    rows = tuple(_op(stage, block, work, count) for (block, work), count in counts.items())
    return Part(
        title="What runs again before a layer's backward",
        about="The forward's own ops and collectives, in every micro-batch.",
        columns=columns,
        rows=rows,
    )


def _op(stage: Stage, block: str, work: OpWork, count: int) -> tuple[Value, ...]:
    seconds = count * pass_parts(work.forward, stage.place, backward=False).total_s
    moved = sum(one.bytes for one in work.forward.traffic)
    return block, work.name, work.module, count, _flops([work.forward]), moved, seconds


def _flops(passes: Iterable[Pass]) -> int:
    """Of matmuls and of fused attention's forward."""
    return sum(
        sum(one.flops for one in work.matmuls) + (work.attention.flops if work.attention else 0) for work in passes
    )


def _step_flops(stage: Stage) -> int:
    """Of this rank's step: forwards, backwards and what runs again. A fused attention's backward counts as two forwards."""
    total = 0
    for element, count in _elements(stage).items():
        work = block_work(element.block, stage.context)
        again = stage.again(element)
        attention = sum(one.backward.attention.flops for one in work if one.backward.attention)
        each = _flops(one.forward for one in (*work, *again)) + _flops(one.backward for one in work) + attention
        total += count * element.size * each
    return total * stage.job.data.grad_accum


def _cost(one: OneRank, without: OneRank) -> Part:
    columns = (
        Column(name="what", head="what"),
        Column(name="flops", head="FLOPs of this rank", unit="flops"),
        Column(name="recompute_s", head="recomputation", unit="seconds"),
        Column(name="step_s", head="step", unit="seconds"),
        Column(name="activation_bytes", head="activations at the peak", unit="bytes"),
        Column(name="allocated_bytes", head="allocated at the peak", unit="bytes"),
    )
    rows = [_row(what, rank) for what, rank in (("without", without), ("with", one))]
    more = tuple(after - before for before, after in zip(rows[0][1:], rows[1][1:], strict=True))
    return Part(
        title="What it costs and saves",
        about="The estimate and the time of this job, and of the same with recompute: none.",
        columns=columns,
        rows=(*rows, ("difference", *more)),
    )


def _row(what: str, one: OneRank) -> tuple[str, int, float, float, int, int]:
    return (
        what,
        _step_flops(one.timed),
        dict(one.timed.parts.items).get("recompute", 0.0),
        step_time(one.job, one.graph).step_s,
        by_category(one.ledger).get("activations", 0),
        sum(line.bytes for line in one.ledger),
    )
