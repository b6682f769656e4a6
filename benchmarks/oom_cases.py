"""docs/oom.md's table: real reports of runs out of memory, the cause that is stated and the causes that ``ullage why`` names; the fix that
the thread tells of, and whether it is among the advice.

``python -m benchmarks.oom_cases`` prints it. The reports and the jobs are tests/postmortem/data's; a report that shows no message
is asked as a bare "CUDA out of memory."
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ullage

DATA = Path(__file__).parents[1] / "tests" / "postmortem" / "data"
BARE = "torch.cuda.OutOfMemoryError: CUDA out of memory."
NAMED_AMONG = 2
TARGET = 0.85
FIXES = 0.95
VERDICTS = ("fits", "tight", "oom")
MISSING = "missing"


class Row(NamedTuple):
    case: str
    stated: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    note: str
    fix: str
    failed_advised: bool

    @property
    def right(self) -> bool:
        return any(kind in self.stated for kind, _ in self.named[:NAMED_AMONG])

    @property
    def wrongly_certain(self) -> bool:
        return any(certainty == "certain" and kind not in self.stated for kind, certainty in self.named)


def rows(reports: str = "cases.toml") -> Iterator[Row]:
    """Each case, asked as a person would ask it: the message and the job. reports: the file of DATA that they are in."""
    messages = {case["id"]: case["text"] for case in json.loads((DATA / "messages.json").read_text(encoding="utf-8"))}
    for case in tomllib.loads((DATA / reports).read_text(encoding="utf-8"))["case"]:
        job = ullage.read_job(case["job"]) if "job" in case else None
        message = case.get("message") or messages.get(case["id"])
        answer = ullage.why(message or BARE, job)
        note = case.get("as", "")
        if message is None:
            note = f"{note}; no message" if note else "no message"
        yield Row(
            case=case["id"],
            stated=tuple(case["causes"]),
            named=tuple((one.kind, one.certainty) for one in answer.causes),
            note=note,
            fix=fix_of(case.get("fix", []), answer),
            failed_advised=any(
                one.verdict_after == "fits" and one.change.as_dict() == failed
                for failed in case.get("failed", [])
                for one in answer.advice
            ),
        )


def fix_of(told: list[dict[str, object] | str], answer: ullage.Why) -> str:
    """How the answer has one of the fixes: the advice that makes its changes, with the verdict; in words; or not."""
    if not told:
        return ""
    found = [one for one in answer.advice if any(_makes(one.change.as_dict(), fix) for fix in told)]
    if found:
        best = min(found, key=lambda one: VERDICTS.index(one.verdict_after))
        return f"{best.what}: {best.verdict_after}"
    if any(isinstance(fix, str) and fix in one.what for fix in told for one in answer.in_words):
        return "in words"
    fits = [one.what for one in answer.advice if one.verdict_after == "fits"]
    return f"{MISSING}; {fits[0]} fits before it" if fits else MISSING


def _makes(change: dict[str, object], fix: dict[str, object] | str) -> bool:
    return isinstance(fix, dict) and fix.items() <= change.items()


def page(found: list[Row]) -> Iterator[str]:
    right = sum(row.right for row in found)
    wrong = sum(row.wrongly_certain for row in found)
    told = [row for row in found if row.fix]
    have = sum(not row.fix.startswith(MISSING) for row in told)
    failed = sum(row.failed_advised for row in found)
    yield f"{right} of {len(found)} named first or second ({right / len(found):.1%}); {wrong} wrong as certain."
    yield f"{have} of {len(told)} fixes of a thread are among the advice; {failed} advised as fitting that a thread says failed.\n"
    yield "| report | stated | first | second | | note | the thread's fix |"
    yield "|---|---|---|---|---|---|---|"
    for row in found:
        first, second = (*(f"{kind} ({certainty})" for kind, certainty in row.named[:NAMED_AMONG]), "-", "-")[
            :NAMED_AMONG
        ]
        miss = "" if row.right else "miss"
        yield f"| {row.case} | {', '.join(row.stated)} | {first} | {second} | {miss} | {row.note} | {row.fix} |"


if __name__ == "__main__":
    print("\n".join(page(list(rows()))))
