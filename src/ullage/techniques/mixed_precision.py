"""Mixed precision: each copy of a parameter with its type, where one type becomes another, and whether the loss is scaled.

Sources: arXiv 1710.03740 (master copies, loss scaling); arXiv 1910.02054, section 3.1 (16 bytes a parameter). Which engine keeps what in
which type: job/precision.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.job.job import Job
from ullage.techniques.owned import held, owned
from ullage.techniques.rank import OneRank
from ullage.techniques.told import Column, Part, Shown, unused

_FSDP = ("fsdp1", "fsdp2")
_SCALED = (
    "fp16 has no gradients below 6e-8: the loss is multiplied before the backward, gradients are divided before the step, and a step \
whose gradients overflow is left out."
)
_NOT_SCALED = "{} has the exponents of fp32: gradients do not underflow, and the loss is not scaled."


def told(job: Job, index: int | None) -> Shown:
    precision = job.precision
    kinds = {
        precision.params,
        precision.compute,
        precision.grads,
        precision.reduce,
        precision.master or precision.params,
    }
    if len(kinds | {job.optimizer.state}) == 1:
        raise unused("mixed precision", key="precision", value=precision.params, remedy="set precision to bf16-mixed")
    one = OneRank(job, index)
    about = (
        _SCALED
        if precision.compute == "fp16"
        else _NOT_SCALED.format(precision.params if precision.compute in ("fp8", "fp4") else precision.compute)
    )
    return Shown(
        technique="mixed-precision",
        job=job,
        stage=one.stage,
        parts=(
            owned(job, one.stage, "Copies of a parameter that stay"),
            _casts(job),
            Part(title="Loss scaling", about=about),
            held(one, "gathered"),
        ),
    )


def _casts(job: Job) -> Part:
    columns = (
        Column(name="what", head="what"),
        Column(name="when", head="when"),
        Column(name="source", head="from"),
        Column(name="target", head="to"),
    )
    rows = tuple(row for row in _cast_rows(job) if row[2] != row[3])
    return Part(title="Where types change", about="In the order of a step.", columns=columns, rows=rows)


def _cast_rows(job: Job) -> Iterator[tuple[str, str, str, str]]:
    precision = job.precision
    compute = "bf16" if precision.compute in ("fp8", "fp4") else precision.compute
    stored, master = precision.params, precision.master or precision.params
    if job.engine.name in _FSDP:
        stored = master if precision.params != master else precision.params  # one copy, cast for each gather
        yield "the shard of a parameter", "before its all-gather", stored, compute
    elif precision.autocast:
        yield "a weight", "where an op first uses it, kept to the forward's end", stored, compute
    else:
        yield "a weight", "where an op uses it", stored, compute
    if precision.compute != compute:
        yield "weights and inputs of the layers' matmuls", "at each matmul", compute, precision.compute
    if job.engine.name in _FSDP:
        yield "the gradients of a block", "before their reduction", compute, precision.reduce
        yield "the reduced shard", "after its reduction", precision.reduce, stored
    else:
        made = stored if precision.autocast else compute
        yield "a gradient", "where it is added to those that are kept", made, precision.grads
        yield "the gradients", "before their reduction", precision.grads, precision.reduce
        yield "the gradients", "for the optimizer's step", precision.reduce, master
    if job.engine.name not in _FSDP:
        yield "the master copy", "after the step, into the parameters", master, stored
