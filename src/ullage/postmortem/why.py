"""``why``: from a message, a log or a snapshot, and the job if there is one, to causes and to what helps.

What knows of jobs is loaded where there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.frozen import frozen
from ullage.postmortem.alone import alone, unnamed
from ullage.postmortem.causes import LIKELY, Cause, Reason, judged
from ullage.postmortem.difference import Difference, between, grown, predicted
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.filled import filled
from ullage.postmortem.in_words import InWords, in_words
from ullage.postmortem.useless import Useless, useless

if TYPE_CHECKING:
    from ullage.job.job import Job
    from ullage.postmortem.advice import Advice, Edit
    from ullage.postmortem.matching import Candidate
    from ullage.postmortem.with_job import Known


@frozen
class Answer:
    """What happened (evidence), the causes by what speaks for each, and every tensor that the size could be.

    job: on the card that failed, None where none was given; unmodelled: why its account could not be made. difference: of a snapshot
    against another, or else against the job's account. doubts: what speaks against the job being the one that ran.
    """

    evidence: Evidence
    causes: tuple[Cause, ...]
    candidates: tuple[Candidate, ...] = ()
    job: Job | None = None
    unmodelled: str | None = None
    difference: Difference | None = None
    doubts: tuple[str, ...] = ()


@frozen
class Why:
    """What ``ullage why`` answers. useless: what is often tried and does not help here, with the reason. in_words: what helps and is not
    estimated. beyond_bytes: what the run needed of the card more than its account says; each estimate of the advice has it added."""

    evidence: Evidence
    causes: tuple[Cause, ...]
    answer: Answer
    advice: tuple[Advice, ...]
    useless: tuple[Useless, ...]
    in_words: tuple[InWords, ...] = ()
    beyond_bytes: int = 0


def why(
    evidence: Evidence,
    job: Job | None = None,
    against: Evidence | None = None,
    contradicted: tuple[str, ...] = (),
    miscounted: tuple[str, ...] = (),
) -> Answer:
    """The causes of what the evidence tells. against: an earlier snapshot, where the evidence is one. contradicted: what a person's file
    asked for and no run of its engine can have, in words; miscounted: what it says of GPUs and sequences and the launch did not have.

    Raises UllageError where the job's layout cannot exist, InvalidInput where two snapshots are asked for and one is none.
    """
    here: Known | None = None
    found: tuple[Candidate, ...] = ()
    spoken = [*alone(evidence), *filled(evidence)]
    if job is None and not any(reason.weight >= LIKELY for reason in spoken):
        spoken += unnamed(evidence)
    difference = between(evidence, against) if against is not None else None
    if difference is not None:
        spoken += grown(difference)
    if evidence.recognised != "not-oom":
        spoken += [
            Reason(kind="config", weight=2.2, why=f"the configuration asks for what is not carried out: {one}")
            for one in contradicted
        ]
    doubts = miscounted
    if job is not None:
        from ullage.postmortem.doubts import doubted, on_the_card
        from ullage.postmortem.with_job import known, matching, reasons

        given, job = job, on_the_card(job, evidence.numbers)
        here = known(job, evidence.event.rank if evidence.event is not None else None)
        found = matching(here, evidence)
        spoken += reasons(here, evidence, found)
        doubts += tuple(doubted(given, evidence.numbers, here.worst.peak.bytes if here.worst is not None else None))
        if difference is None and evidence.blocks and here.worst is not None:
            difference = predicted(evidence, here.worst, len(here.held))
    return Answer(
        evidence=evidence,
        causes=judged(spoken) or _unknown(evidence, here),
        candidates=found,
        job=job,
        unmodelled=here.unmodelled if here is not None else None,
        difference=difference,
        doubts=doubts,
    )


def advised(answer: Answer, edit: Edit | None = None) -> Why:
    """The answer with what helps. Without a job, or for one that no account models, there is no advice to estimate."""
    evidence, job = answer.evidence, answer.job
    found: tuple[Advice, ...] = ()
    beyond = 0
    if job is not None and answer.unmodelled is None and evidence.recognised != "not-oom":
        from ullage.postmortem.advice import Search

        of_host = evidence.recognised == "host-oom" or any(one.kind == "host-memory" for one in answer.causes)
        search = Search(job, edit, answer)
        found = tuple(search.on_host() if of_host else search.found())
        beyond = search.beyond_bytes
    return Why(
        evidence=evidence,
        causes=answer.causes,
        answer=answer,
        advice=found,
        useless=useless(
            evidence, answer.causes, {key for one in found if one.verdict_after != "oom" for key in one.change}
        ),
        in_words=in_words(answer.causes, evidence.numbers, job, (key for one in found for key in one.change)),
        beyond_bytes=beyond,
    )


def _unknown(evidence: Evidence, here: Known | None) -> tuple[Cause, ...]:
    """Said plainly where nothing speaks for any cause; nothing where there was no failure of memory."""
    if evidence.recognised == "not-oom":
        return ()
    if evidence.event is None:
        reason = "no line of it tells of a failure that is known"
    elif here is not None:
        reason = "no tensor of the job has the size that failed, and its account does not fill the card"
    else:
        reason = "the numbers alone do not say; the job (--job, or --config, --model and --cluster) may"
    return judged([Reason(kind="unknown", weight=1.0, why=reason)])
