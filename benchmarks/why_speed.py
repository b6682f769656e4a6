"""How long an answer to a message and a job takes on this machine, the start of the process and all imports included.

A search for advice ends with the first change that fits, so that jobs differ: every report of docs/oom.md that has a job, the fastest
first, and a message alone. Processor seconds, user's and system's: what an idle machine takes, as nothing is waited for and nothing runs
beside it; the least of some runs, as on a machine that others use the same work takes longer. Bytecode is kept, as an installed package
has it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from oom_cases import BARE, DATA

RUNS = 5
GOAL_S = 0.5


def seconds(*arguments: str) -> float:
    command = [sys.executable, "-m", "ullage", "why", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 1 or not done.stdout:  # it ran out of memory
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def least_s(*arguments: str) -> float:
    return min(seconds(*arguments) for _ in range(RUNS))


def main() -> None:
    messages = {case["id"]: case["text"] for case in json.loads((DATA / "messages.json").read_text(encoding="utf-8"))}
    cases = tomllib.loads((DATA / "cases.toml").read_text(encoding="utf-8"))["case"]
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        for case in cases:
            if "job" in case:
                job.write_text(json.dumps(case["job"]), encoding="utf-8")
                message = case.get("message") or messages.get(case["id"], BARE)
                found[case["id"]] = least_s(message, "--job", str(job))
    ranked = sorted(found.items(), key=lambda entry: entry[1])
    for name, took in ranked:
        print(f"  {name:<24} {1000 * took:7.0f} ms")
    within = sum(took < GOAL_S for _, took in ranked)
    middle, slowest = ranked[len(ranked) // 2][1], ranked[-1][1]
    print(
        f"  {within} of {len(ranked)} below {1000 * GOAL_S:.0f} ms; median {1000 * middle:.0f}, slowest {1000 * slowest:.0f} ms"
    )
    print(f"  {'a message alone':<24} {1000 * least_s(BARE):7.0f} ms")


if __name__ == "__main__":
    main()
