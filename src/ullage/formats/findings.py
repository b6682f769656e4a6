"""What is wrong or wasteful with a job that a file describes. Each rule looks at the file, the job and its estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ullage.engines.changes import answer_to
from ullage.engines.estimate import Estimate
from ullage.formats.known import UNKNOWN, what_then
from ullage.formats.reading import Finding, Reading, Severity
from ullage.formats.tree import dotted
from ullage.job.job import Job
from ullage.units import format_bytes

_SMALL_BUCKET = 1_000_000
"""Elements: 2 MB in 16 bits cross a 100 GB/s link in 20 µs, about the latency of one collective (docs/formats.md)."""
_LARGE_BUFFER_RATIO = 0.1
_FREE_RATIO = 0.5
"""Of the card, at the high end of the interval: so much free says that the job was cut for a smaller one."""

Rule = Callable[[Reading, Job, Estimate], Iterator[Finding]]


def findings(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    """What stands in the file alone, then each rule's."""
    yield from reading.findings
    yield from _unknown_keys(reading)
    for rule in RULES:
        yield from rule(reading, job, answer)


def _unknown_keys(reading: Reading) -> Iterator[Finding]:
    for one in reading.leftovers:
        if one.why.startswith(UNKNOWN):
            what, _, remedy = one.why.partition("; ")
            then = what_then(reading.format, one.path)
            yield Finding(severity="warning", key=one.key, what=f"{what}: {then}", remedy=remedy or "take it out")


def _key(reading: Reading, key: str) -> str:
    """Their name for a job key, where the file has one."""
    path = reading.origins.get(key)
    return dotted(path) if path else key


def _fits_without(severity: Severity, key: str, change: dict[str, object], what: str, remedy: str) -> Rule:
    """A rule: without something that costs speed the job fits as well."""

    def rule(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
        if answer.verdict != "fits":
            return
        other = answer_to(job, change)
        if other is not None and other.verdict == "fits":
            left = format_bytes(other.capacity_bytes - other.peak.high_bytes)
            yield Finding(
                severity=severity,
                key=_key(reading, key),
                what=f"{what}; without, {left} stay free",
                remedy=remedy,
            )

    return rule


def _offload(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    for part in ("optimizer", "params"):
        if getattr(job.offload, part) != "none":
            change: dict[str, object] = {f"offload.{part}": "none"}
            if job.engine.name == "fsdp2" or part == "optimizer":
                change = {"offload.optimizer": "none", "offload.params": "none"}
            what = (
                f"the {'optimizer' if part == 'optimizer' else 'parameters'} cross the PCIe link each step for nothing"
            )
            rule = _fits_without("advice", f"offload.{part}", change, what, "take the offload out")
            yield from rule(reading, job, answer)
            return


def _recompute(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    if job.recompute.kind == "none":
        if answer.verdict != "fits":
            other = answer_to(job, {"recompute": "full"})
            if other is not None and other.peak.device_bytes < answer.peak.device_bytes:
                freed = format_bytes(answer.peak.device_bytes - other.peak.device_bytes)
                yield Finding(
                    severity="warning",
                    key=_key(reading, "recompute"),
                    what=f"activation checkpointing is off, and memory runs out: it frees {freed} and then {_verdict(other)}",
                    remedy="turn it on; a step takes about a third more compute",
                )
        return
    rule = _fits_without(
        "advice",
        "recompute",
        {"recompute": "none"},
        "activation checkpointing runs the forward twice, and memory does not ask for it",
        "turn it off, or raise the micro-batch",
    )
    yield from rule(reading, job, answer)


def _verdict(answer: Estimate) -> str:
    return {"fits": "it fits", "tight": "it is tight", "oom": "it still does not fit"}[answer.verdict]


def _stage(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    if (
        job.engine.name in ("deepspeed", "fsdp1", "fsdp2")
        and job.engine.zero_stage == 3
        and job.offload.params == "none"
    ):
        rule = _fits_without(
            "advice",
            "engine.zero_stage",
            {"engine.zero_stage": 2},
            "stage 3 gathers every layer in forward and in backward, and stage 2 fits",
            "use stage 2",
        )
        yield from rule(reading, job, answer)


def _buckets(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    if job.engine.name != "deepspeed":
        return
    names = ["reduce_bucket_size", "allgather_bucket_size"]
    if job.engine.zero_stage == 3:
        names = ["reduce_bucket_size", "stage3_prefetch_bucket_size"]
    for name in names:
        value = job.engine.options.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        key = _key(reading, f"engine.options.{name}")
        if value < _SMALL_BUCKET:
            yield Finding(
                severity="warning",
                key=key,
                what=f"{value:g} elements: each collective is so short that its latency is all its time",
                remedy="use 5e7, or auto under the Trainer",
            )
    yield from _large_buckets(reading, job, answer)


def _large_buckets(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    value = job.engine.options.get("reduce_bucket_size")
    default = 500_000_000
    if not isinstance(value, int | float) or value <= default:
        return
    other = answer_to(job, {"engine.options.reduce_bucket_size": default})
    if other is None:
        return
    freed = answer.peak.device_bytes - other.peak.device_bytes
    if freed > _LARGE_BUFFER_RATIO * answer.capacity_bytes:
        yield Finding(
            severity="warning",
            key=_key(reading, "engine.options.reduce_bucket_size"),
            what=f"{value:g} elements hold {format_bytes(freed)} more than DeepSpeed's default of {default:g}",
            remedy="use 5e8 or less",
        )


def _micro_batch(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    """Half the card free: a larger micro-batch fills the GPU's units better."""
    if answer.verdict != "fits" or answer.peak.high_bytes > _FREE_RATIO * answer.capacity_bytes:
        return
    larger, best = 2 * job.data.micro_batch, None
    while (other := answer_to(job, {"data.micro_batch": larger})) is not None and other.verdict == "fits":
        best, larger = larger, 2 * larger
        if best >= 64 * job.data.micro_batch:
            break
    if best is not None:
        free = format_bytes(answer.capacity_bytes - answer.peak.high_bytes)
        accum = job.data.grad_accum * job.data.micro_batch
        same_step = f", with accumulation {accum // best} for the same step" if accum % best == 0 else ""
        yield Finding(
            severity="advice",
            key=_key(reading, "data.micro_batch"),
            what=f"{free} are never used; micro-batch {best} fits",
            remedy=f"use {best}{same_step}",
        )


def _host_memory(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    host = job.cluster.host_memory_bytes
    if host is not None and answer.is_over_host:
        yield Finding(
            severity="error",
            key=_key(reading, "offload.optimizer"),
            what=f"the offload needs {format_bytes(answer.host_bytes)} of host memory, and a node has {format_bytes(host)}",
            remedy="use more nodes, or take the offload out",
        )


def _master(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    """fp32 throughout on a card with 16-bit units."""
    capability = job.cluster.device.compute_capability
    if job.precision.compute == "fp32" and capability is not None and capability >= (7, 0):
        name = "bf16" if capability >= (8, 0) else "fp16"
        yield Finding(
            severity="warning",
            key=_key(reading, "precision"),
            what=f"everything is fp32: the tensor cores of {job.cluster.device.name} stand idle, activations are twice as large",
            remedy=f"turn {name} on",
        )


def _verdict_itself(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    if answer.verdict == "fits" or answer.is_over_host:  # which _host_memory tells
        return
    peak, capacity = answer.peak, answer.capacity_bytes
    oom = answer.verdict == "oom"
    span = f"{format_bytes(peak.low_bytes)} to {format_bytes(peak.high_bytes)} in {peak.moment}; the GPU has {format_bytes(capacity)}"
    yield Finding(
        severity="error" if oom else "warning",
        key="memory",
        what=f"{'does not fit' if oom else 'may not fit'}: {span}",
        remedy="free memory: the other findings say how",
    )


def _job_warnings(reading: Reading, job: Job, answer: Estimate) -> Iterator[Finding]:
    for warning in job.warnings:
        key, _, rest = warning.partition(": ")
        what, _, remedy = rest.partition("; ")
        name, _, value = key.partition(" = ")
        yield Finding(severity="advice", key=_key(reading, name), what=f"{value}: {what}", remedy=remedy)


RULES: tuple[Rule, ...] = (
    _verdict_itself, _recompute, _buckets, _offload, _stage, _micro_batch, _host_memory, _master, _job_warnings,
)  # fmt: skip
