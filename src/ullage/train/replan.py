"""The job that a training goes on as where it ran out of memory, and the job whose card is a budget."""

from __future__ import annotations

from ullage.engines.changes import changed
from ullage.engines.estimate import estimate
from ullage.errors import OutOfMemory, UllageError
from ullage.frozen import replace
from ullage.job.job import Job
from ullage.postmortem.advice import Advice
from ullage.postmortem.source import read_input
from ullage.postmortem.why import advised, why
from ullage.train.reach import refuse_what_is_not_run
from ullage.units import format_bytes


def following(error: OutOfMemory, job: Job) -> tuple[Job, Advice] | None:
    """Of the changes that ``ullage why`` would try, the first that fits by the estimate, or the least that is tight.

    It is run here, and leaves a step the sequences that it has, and what is learnt of them, so that the checkpoints are still of it.
    """
    found = []
    for advice in advised(why(read_input(str(error.value)), job)).advice:
        other = changed(job, advice.change.as_dict()) if advice.verdict_after != "oom" else None
        if other is not None and _goes_on(other, job):
            found.append((other, advice))
    return min(found, key=lambda one: (one[1].verdict_after != "fits", one[1].high_bytes or 0), default=None)


def _goes_on(other: Job, job: Job) -> bool:
    try:
        refuse_what_is_not_run(other)
    except UllageError:
        return False
    return _learning(other) == _learning(job) and other.layout.world == job.layout.world


def _learning(job: Job) -> tuple[object, ...]:
    """The sequences of a step, what is trained, and by which rule."""
    sequences = job.data.micro_batch * job.data.grad_accum * job.layout.dp
    return job.data.seq_len, sequences, job.lora, job.precision.params, job.optimizer.name, job.optimizer.state


def with_budget(job: Job, budget_bytes: int | None) -> Job:
    """The job on cards whose allocator has this much, beside what the estimate puts outside it."""
    if budget_bytes is None:
        return job
    peak = estimate(job).peak
    capacity = budget_bytes + peak.device_bytes - peak.reserved_bytes
    device = replace(job.cluster.device, name=f"budget of {format_bytes(budget_bytes)}", capacity_bytes=capacity)
    return replace(job, cluster=replace(job.cluster, device=device))
