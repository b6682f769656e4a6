"""Whether the job is the one that ran: its card and its tensors against what the message says."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.frozen import replace
from ullage.job.job import Job
from ullage.memory.overhead import outside_allocator
from ullage.postmortem.messages import Numbers
from ullage.units import format_bytes

_OTHER_CARD = 0.1
"""Of the card: drivers, ECC and rounding in print make less of a difference."""
_OTHER_JOB = 1.5
"""Of 227 measurements of allocated bytes two are further above their account's peak (docs/accuracy.md)."""


def on_the_card(job: Job, numbers: Numbers) -> Job:
    """The job on a card of the size that failed, where the message tells of another than the job's. A share of a card (a budget) is told
    without what lies outside of its allocator."""
    device = job.cluster.device
    capacity = numbers.capacity_bytes
    outside = sum(one.high_bytes for one in outside_allocator(job.cluster, (), eager=False))
    same = max(_OTHER_CARD * device.capacity_bytes, outside)
    if not capacity or abs(capacity - device.capacity_bytes) <= same:
        return job
    failed = replace(device, name=f"{device.name} of {format_bytes(capacity)}", capacity_bytes=capacity)
    return replace(job, cluster=replace(job.cluster, device=failed))


def doubted(job: Job, numbers: Numbers, peak_bytes: int | None) -> Iterator[str]:
    """job: as it was given. peak_bytes: allocated at its highest by its account, None where it has none."""
    if on_the_card(job, numbers) is not job:
        device = job.cluster.device
        yield (
            f"the card that failed has {format_bytes(numbers.capacity_bytes or 0)}, and the job's {device.name} "
            f"{format_bytes(device.capacity_bytes)}: what follows is of the card that failed"
        )
    allocated = numbers.allocated_bytes
    if allocated is not None and peak_bytes is not None and allocated > _OTHER_JOB * peak_bytes:
        yield (
            f"{format_bytes(allocated)} was allocated when it failed, and this job takes {format_bytes(peak_bytes)} at most: another model,"
            " longer sequences or a larger batch may have run, or something is kept from step to step"
        )
