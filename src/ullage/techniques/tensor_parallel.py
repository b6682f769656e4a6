"""Tensor parallelism: which matrices are cut and how, what is exchanged around them, layer by layer and in a step.

Sources: Megatron-LM, arXiv 1909.08053, section 3 (columns, then rows); arXiv 2205.05198, section 4.2.2 (sequence parallelism).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ullage import dtypes
from ullage.job.bind import is_tensor_parallel
from ullage.job.job import Job
from ullage.memory.rank import LocalParam
from ullage.model.graph import Op
from ullage.techniques.exchanges import PAYLOAD, SECONDS, part, wire_bytes
from ullage.techniques.rank import OneRank
from ullage.techniques.told import Column, Part, Shown, Value, unused
from ullage.timing.transfers import Transfer

_CUTS = {"column": "by column", "row": "by row"}
_COLUMN = "Column-parallel matrices give each rank some of the outputs, row-parallel ones take them in and leave sums to be added up. "
_SP = "With sequence parallelism the input is gathered before the first and the sum scattered after the second."
_PLAIN = "The sum is all-reduced after the second, and in the backward the input's gradient before the first."


def told(job: Job, index: int | None) -> Shown:
    if job.layout.tp == 1:
        raise unused("tensor parallelism", key="layout.tp", value=1, remedy="set layout.tp to 2, 4 or 8, within a node")
    one = OneRank(job, index)
    found = [transfer for transfer in one.transfers if transfer.exchange.axis == "tp"]
    phases = [
        (phase, mine)
        for phase in ("forward", "backward", "recompute")
        if (mine := [transfer for transfer in found if transfer.phase == phase])
    ]
    names = {"forward": "Forward", "backward": "Backward", "recompute": "Recomputation in the backward"}
    return Shown(
        technique="tensor-parallel",
        job=job,
        stage=one.stage,
        parts=(
            _matrices(one),
            *(
                part(names[phase], _COLUMN + (_SP if job.layout.sp else _PLAIN) if phase == "forward" else "", mine)
                for phase, mine in phases
            ),
            _step(phases),
        ),
        notes=(PAYLOAD, SECONDS),
    )


def _matrices(one: OneRank) -> Part:
    columns = (
        Column(name="parameter", head="parameter"),
        Column(name="cut", head="cut"),
        Column(name="copies", head="copies", unit="count"),
        Column(name="whole", head="whole", unit="shape"),
        Column(name="here", head="here", unit="shape"),
        Column(name="bytes", head="bytes here", unit="bytes", summed=True),
    )
    ops = {f"{block.name}.{param.name}": op for block in one.graph.blocks() for op in block.ops for param in op.params}
    return Part(
        title="What is cut",
        about="Outputs x inputs of each parameter; what is not cut is held whole by every rank of the group.",
        columns=columns,
        rows=tuple(_matrix(one, local, ops[local.name]) for local in one.rank.params),
    )


def _matrix(one: OneRank, local: LocalParam, op: Op) -> tuple[Value, ...]:
    param, context = local.param, one.timed.context
    leading = op.attrs.get("out")
    count = len(leading) if isinstance(leading, tuple) and param.dims[: len(leading)] == leading else 1
    shape = [dims for dims in (param.dims[:count], param.dims[count:]) if dims]
    cut = "whole"
    if is_tensor_parallel(param):
        cut = _CUTS.get(str(op.attrs.get("parallel")), "by vocabulary" if op.kind == "embedding" else "by features")
    return (
        local.name,
        cut,
        local.copies,
        tuple(math.prod(map(one.graph.size, dims)) for dims in shape),
        tuple(context.numel(dims) for dims in shape),
        dtypes.size_bytes(local.total, one.job.precision.params),
    )


def _step(phases: Iterable[tuple[str, list[Transfer]]]) -> Part:
    columns = (
        Column(name="phase", head="phase"),
        Column(name="count", head="collectives a step", unit="count", summed=True),
        Column(name="wire_bytes", head="wire, a step", unit="bytes", summed=True),
        Column(name="sent_s", head="on the wire", unit="seconds", summed=True),
        Column(name="waited_s", head="waited for", unit="seconds", summed=True),
    )
    rows = tuple(
        (
            phase,
            sum(one.count for one in mine),
            wire_bytes(mine),
            sum(one.sent_s for one in mine),
            sum(one.count * one.wait_s for one in mine if one.wait_s is not None),
        )
        for phase, mine in phases
    )
    about = "All layers and micro-batches. What is not waited for runs beside the matmuls of the same layer."
    return Part(title="In a step", about=about, columns=columns, rows=rows)
