"""How long an answer to a message and a job takes on this machine, the start of the process and all imports included.

A search for advice ends with the first change that fits, so that jobs differ: three reports of docs/oom.md, and a message alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from functools import partial
from pathlib import Path

from estimate_speed import median_s
from oom_cases import BARE, DATA

CASES = ("Qwen3-VL#2053", "LlamaFactory#1221", "FastChat#390")
RUNS = 10
GOAL_S = 0.5


def answered(*arguments: str) -> None:
    command = [sys.executable, "-m", "ullage", "why", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 1 or not done.stdout:  # it ran out of memory
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def main() -> None:
    messages = {case["id"]: case["text"] for case in json.loads((DATA / "messages.json").read_text(encoding="utf-8"))}
    cases = {case["id"]: case for case in tomllib.loads((DATA / "cases.toml").read_text(encoding="utf-8"))["case"]}
    answered(BARE)  # writes the bytecode
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            job = Path(folder) / "job.json"
            job.write_text(json.dumps(cases[name]["job"]), encoding="utf-8")
            seconds = median_s([partial(answered, messages.get(name, BARE), "--job", str(job))] * RUNS)
            print(f"  {name:<20} {1000 * seconds:9.2f} ms   median of {RUNS}   goal {1000 * GOAL_S:g} ms")
    print(f"  {'a message alone':<20} {1000 * median_s([partial(answered, BARE)] * RUNS):9.2f} ms   median of {RUNS}")


if __name__ == "__main__":
    main()
