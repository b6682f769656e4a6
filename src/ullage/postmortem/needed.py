"""What a run needed beyond its account: a run that failed needed more than the card, whatever its account says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.postmortem.causes import Cause

if TYPE_CHECKING:
    from ullage.postmortem.option import Option
    from ullage.postmortem.why import Answer

OUTSIDE_STEP = ("save", "load", "evaluation", "foreign-process", "config", "leak", "host-memory")
"""Causes that no change of the step is against, where the step fits."""
_OF_THE_ALLOCATOR = ("fragmentation", "communicators")
"""Causes under which what was needed was there, in pieces or in torch's cache."""


def outside_step(causes: tuple[Cause, ...]) -> bool:
    return bool(causes) and causes[0].kind in OUTSIDE_STEP and causes[0].certainty != "possible"


def beyond_bytes(answer: Answer, before: Option) -> int:
    """Bytes of the card to add to every estimate of this run; 0 where the account explains the failure, or tells nothing of it.

    By the message: what was allocated, what was tried, and what was neither free nor torch's; without numbers: the card.
    before: the job as it ran.
    """
    evidence, causes = answer.evidence, answer.causes
    if answer.candidates and not answer.candidates[0].made.in_step:
        return 0
    if evidence.recognised not in ("cuda-oom", "hip-oom") or outside_step(causes):
        return 0
    if causes and causes[0].kind in _OF_THE_ALLOCATOR:
        return 0
    least = before.least
    assert least is not None, "a job without an account is not advised"
    numbers = evidence.numbers
    needed = before.job.cluster.device.capacity_bytes
    if numbers.tried_bytes is not None and numbers.allocated_bytes is not None:
        elsewhere = least.outside_bytes
        free = numbers.sane(numbers.free_bytes)
        if numbers.capacity_bytes is not None and free is not None and numbers.reserved_bytes is not None:
            elsewhere = max(0, numbers.capacity_bytes - free - numbers.reserved_bytes)
        needed = max(needed, numbers.allocated_bytes + numbers.tried_bytes + elsewhere)
    if least.peak_bytes + least.outside_bytes >= needed:
        return 0
    return max(0, needed - before.estimate.peak.device_bytes)
