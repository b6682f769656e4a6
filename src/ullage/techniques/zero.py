"""ZeRO: who owns which share of parameters, gradients and optimizer states, what is gathered and reduced when, and what that sends.

Source of the accounting: ZeRO, arXiv 1910.02054, sections 5 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ullage import dtypes
from ullage.comm.volume import sent_bytes
from ullage.job.job import Job
from ullage.techniques.exchanges import PAYLOAD, part, wire_bytes
from ullage.techniques.owned import held, owned
from ullage.techniques.rank import OneRank
from ullage.techniques.told import Column, Part, Shown, unused
from ullage.timing.states import is_sharded, resident
from ullage.timing.transfers import Transfer

_AXES = ("shard", "replica", "expert_shard", "expert_replica", "dp", "expert_dp")


def told(job: Job, index: int | None) -> Shown:
    one = OneRank(job, index)
    _used(one)
    found = [transfer for transfer in one.transfers if transfer.exchange.axis in _AXES]
    return Shown(
        technique="zero",
        job=job,
        stage=one.stage,
        parts=(owned(job, one.stage), *_steps(job, found), _volume(one, found), held(one, "gathered")),
        notes=(PAYLOAD,),
    )


def _used(one: OneRank) -> None:
    job = one.job
    replicas = job.layout.dp * job.layout.cp
    if replicas == 1 and not (job.layout.expert_dp > 1 and one.rank.numel(expert=True)):
        raise unused(
            "ZeRO",
            key="layout.dp",
            value=job.layout.dp,
            remedy="set layout.dp to 2 or more: states are divided over it",
        )
    if not job.engine.zero_stage:
        engine = job.engine.name
        if engine in ("single", "ddp"):
            raise unused(
                "ZeRO", key="engine.name", value=engine, remedy="set engine.name to fsdp2, deepspeed, megatron or zero1"
            )
        raise unused("ZeRO", key="engine.zero_stage", value=0, remedy="set engine.zero_stage to 1, 2 or 3")


def _steps(job: Job, found: Iterable[Transfer]) -> Iterable[Part]:
    phases = {phase: [one for one in found if one.phase == phase] for phase in ("forward", "backward", "step")}
    gathered = [one for one in phases["backward"] if one.what == "parameters"]
    reduced = [one for one in phases["backward"] if one.what == "gradients"]
    if is_sharded(job):
        when = "once a step, in its first micro-batch" if resident(job) else "in every micro-batch"
        about = f"Each block's parameters are gathered before it runs, {when}."
        yield part("Forward: gather", about, phases["forward"])
        yield _gathered_again(gathered)
    whose = "the whole sum" if job.engine.name == "zero1" else "the sum of its share"
    yield part("Backward: reduce", f"Each rank ends with {whose}.", reduced)
    norm = "but one number, the norm for clipping" if job.grad_clip else "here"
    about = f"Each rank steps the share that it owns: no other rank has its states. Nothing is sent {norm}."
    yield Part(title="Optimizer", about=about)
    if phases["step"]:
        about = "Each rank sends the parameters that it stepped to all others."
        yield part("After the step: gather", about, phases["step"])


def _gathered_again(found: list[Transfer]) -> Part:
    if not found:
        about = "Parameters stay gathered from the forward to the backward."
        return Part(title="Backward: nothing is gathered", about=about)
    about = "Parameters that were dropped after the forward are gathered again before their block's backward."
    return part("Backward: gather again", about, found)


def _volume(one: OneRank, found: Iterable[Transfer]) -> Part:
    """Beside a plain all-reduce of the gradients once a step, ring, in the same type: what ZeRO's section 7 compares with."""
    job = one.job
    plain = sum(
        sent_bytes("all_reduce", dtypes.size_bytes(one.rank.numel(expert=expert), job.precision.reduce), ranks)
        for expert, ranks in ((False, job.layout.dp * job.layout.cp), (True, job.layout.expert_dp))
    )
    mine, whole = wire_bytes(found), math.ceil(plain)
    columns = (
        Column(name="what", head="what"),
        Column(name="wire_bytes", head="wire, a step", unit="bytes"),
        Column(name="of_all_reduce", head="of the all-reduce", unit="ratio"),
    )
    rows = (
        ("this job: all that the steps above send", mine, mine / whole),
        (f"plain data parallelism: one all-reduce of the gradients in {job.precision.reduce}", whole, 1.0),
    )
    return Part(title="Volume", columns=columns, rows=rows)
