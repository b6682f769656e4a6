"""``ullage why --json``, as docs/job.md names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.postmortem.causes import Cause
from ullage.postmortem.difference import Difference
from ullage.postmortem.why import Why

if TYPE_CHECKING:
    from ullage.postmortem.advice import Advice
    from ullage.postmortem.matching import Candidate

_NUMBERS = (
    "tried_bytes", "capacity_bytes", "free_bytes", "allocated_bytes", "reserved_bytes", "other_processes_bytes", "process_bytes",
    "private_pools_bytes", "allowed_bytes", "device",
)  # fmt: skip


def why(answer: Why) -> dict[str, object]:
    evidence = answer.evidence
    event = evidence.event
    return {
        "recognised": evidence.recognised,
        "numbers": {name: getattr(evidence.numbers, name) for name in _NUMBERS},
        "causes": [_cause(one) for one in answer.causes],
        "candidates": [_candidate(one) for one in answer.answer.candidates],
        "advice": [_advice(one) for one in answer.advice],
        "in_words": [{"kind": one.kind, "what": one.what, "why": one.why} for one in answer.in_words],
        "beyond_bytes": answer.beyond_bytes,
        "no_help": [{"what": one.what, "why": one.why} for one in answer.useless],
        "found": None
        if event is None
        else {
            "source": evidence.source,
            "line": event.line,
            "what": event.what,
            "text": event.text,
            "rank": event.rank,
        },
        "difference": None if answer.answer.difference is None else _difference(answer.answer.difference),
        "failures": dict(evidence.failures),
        "ranks": list(evidence.ranks),
        "unread": list(evidence.unread),
        "warnings": [
            *answer.answer.doubts,
            *([] if answer.answer.unmodelled is None else [f"the job's account: {answer.answer.unmodelled}"]),
        ],
    }


def _cause(one: Cause) -> dict[str, object]:
    tensor = one.tensor
    return {
        "kind": one.kind,
        "certainty": one.certainty,
        "tensor": None
        if tensor is None
        else {"what": tensor.what, "shape": list(tensor.shape), "bytes": tensor.bytes, "moment": tensor.moment},
        "why": one.why,
    }


def _candidate(one: Candidate) -> dict[str, object]:
    made = one.made
    return {
        "kind": made.kind,
        "what": made.what,
        "shape": list(made.shape),
        "bytes": made.bytes,
        "moment": made.moment,
        "note": made.note,
        "in_step": made.in_step,
        "likelihood": one.likelihood,
        "allocated_low_bytes": made.low_bytes,
        "allocated_high_bytes": made.high_bytes,
    }


def _difference(found: Difference) -> dict[str, object]:
    return {
        "against": found.against,
        "moment": found.moment,
        "categories": [
            {"category": one.category, "bytes": one.bytes, "against_bytes": one.against_bytes}
            for one in found.categories
        ],
        "lines": [
            {"category": one.category, "what": one.what, "bytes": one.bytes, "against_bytes": one.against_bytes}
            for one in found.lines
        ],
    }


def _advice(one: Advice) -> dict[str, object]:
    return {
        "change": one.change.as_dict(),
        "what": one.what,
        "frees_bytes": one.frees_bytes,
        "slowdown_ratio": one.slowdown_ratio,
        "verdict_after": one.verdict_after,
        "low_bytes": one.low_bytes,
        "high_bytes": one.high_bytes,
        "host_bytes": one.host_bytes,
        "frees_host_bytes": one.frees_host_bytes,
        "edit": one.edit,
    }
