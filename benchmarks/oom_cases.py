"""docs/oom.md's table: real reports of runs out of memory, the cause that is stated and the causes that ``ullage why`` names.

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


class Row(NamedTuple):
    case: str
    stated: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    note: str

    @property
    def right(self) -> bool:
        return any(kind in self.stated for kind, _ in self.named[:NAMED_AMONG])

    @property
    def wrongly_certain(self) -> bool:
        return any(certainty == "certain" and kind not in self.stated for kind, certainty in self.named)


def rows() -> Iterator[Row]:
    """Each case, asked as a person would ask it: the message and the job."""
    messages = {case["id"]: case["text"] for case in json.loads((DATA / "messages.json").read_text(encoding="utf-8"))}
    for case in tomllib.loads((DATA / "cases.toml").read_text(encoding="utf-8"))["case"]:
        job = ullage.read_job(case["job"]) if "job" in case else None
        answer = ullage.why(messages.get(case["id"], BARE), job)
        note = case.get("as", "")
        if case["id"] not in messages:
            note = f"{note}; no message" if note else "no message"
        yield Row(case["id"], tuple(case["causes"]), tuple((one.kind, one.certainty) for one in answer.causes), note)


def page(found: list[Row]) -> Iterator[str]:
    right = sum(row.right for row in found)
    wrong = sum(row.wrongly_certain for row in found)
    yield f"{right} of {len(found)} named first or second ({right / len(found):.1%}); {wrong} wrong as certain.\n"
    yield "| report | stated | first | second | | note |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        first, second = (*(f"{kind} ({certainty})" for kind, certainty in row.named[:NAMED_AMONG]), "-", "-")[
            :NAMED_AMONG
        ]
        yield f"| {row.case} | {', '.join(row.stated)} | {first} | {second} | {'' if row.right else 'miss'} | {row.note} |"


if __name__ == "__main__":
    print("\n".join(page(list(rows()))))
