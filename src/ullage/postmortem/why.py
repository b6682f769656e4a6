"""``why``: from a message, a log or a snapshot, and the job if there is one, to causes and to what helps."""

from __future__ import annotations

from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.postmortem.alone import alone, full
from ullage.postmortem.causes import Cause, Reason, judged
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.matching import Candidate
from ullage.postmortem.with_job import Known, known, matching, reasons


@frozen
class Answer:
    """What happened (evidence), the causes by what speaks for each, and every tensor that the size could be.

    job: None where none was given; unmodelled: why its account could not be made.
    """

    evidence: Evidence
    causes: tuple[Cause, ...]
    candidates: tuple[Candidate, ...] = ()
    job: Job | None = None
    unmodelled: str | None = None


def why(evidence: Evidence, job: Job | None = None) -> Answer:
    """The causes of what the evidence tells. Raises UllageError where the job's layout cannot exist."""
    here = known(job) if job is not None else None
    found = matching(here, evidence) if here is not None else ()
    spoken = [*alone(evidence)]
    if here is not None:
        spoken += reasons(here, evidence, found)
    return Answer(
        evidence=evidence,
        causes=judged(spoken) or _unknown(evidence, here),
        candidates=found,
        job=job,
        unmodelled=here.unmodelled if here is not None else None,
    )


def _unknown(evidence: Evidence, here: Known | None) -> tuple[Cause, ...]:
    """Said plainly where nothing speaks for any cause; nothing where there was no failure of memory."""
    if evidence.recognised == "not-oom":
        return ()
    if here is not None:
        reason = "no tensor of the job has the size that failed, and its account does not fill the card"
    else:
        reason = (
            full(evidence.numbers)
            or "the numbers alone do not say; the job (--job, or --config, --model and --cluster) may"
        )
    return judged([Reason(kind="unknown", weight=1.0, why=reason)])
