"""How long an estimate takes on this machine: all ranks of Llama 3.1 405B on 16,384 GPUs.

Four numbers, because one would flatter:

- warm, same job: every cache holds what this job needs;
- warm, new job: the process is warm, but each estimate has a sequence length that was never seen, so that nothing of it can be
  taken from a cache: every rank's account, its peak and its ledger, and for up to three ranks the allocator's simulation, two
  steps played allocation by allocation, which is nearly all of the time;
- new job, account: of that, every rank's account, peak and ledger alone: what is allocated, without what is reserved;
- cold command: ``python -m ullage estimate JOB --json``, the start of the process and all imports included. Python may keep
  bytecode here, as an installed package has it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import ullage
from ullage.engines.registry import account, ranks_of
from ullage.job.job import Job
from ullage.memory.ledger import Line, ledger
from ullage.memory.program import locate_peak
from ullage.model.build import graph as build

JOB_FILE = Path(__file__).with_name("llama-3.1-405b-16k.yaml")
WARM_RUNS = 50
COLD_RUNS = 10
WARM_GOAL_S = 5e-3
COLD_GOAL_S = 0.25
SEQ_LEN_STEP = 64  # keeps the sequence divisible by tp
ANSWERED = (0, 1, 3)  # exit statuses of an estimate: fits, oom, tight


def median_s(runs: Iterable[Callable[[], object]]) -> float:
    """Median of the wall-clock seconds of each run."""
    seconds = []
    for run in runs:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def accounts(job: Job) -> list[tuple[Line, ...]]:
    """Every rank's ledger at its peak, without the allocator's simulation."""
    graph = build(job.model, mtp=job.engine.name == "megatron")
    return [ledger(locate_peak(account(job, graph, rank).program)) for rank in ranks_of(job, graph)]


def cold_command() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "ullage", "estimate", str(JOB_FILE), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode not in ANSWERED or not done.stdout:  # a traceback's status is 1 too
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def main() -> None:
    job = ullage.read_job(JOB_FILE)
    unseen = [
        replace(job, data=replace(job.data, seq_len=job.data.seq_len + SEQ_LEN_STEP * (run + 1)))
        for run in range(2 * WARM_RUNS)
    ]
    ullage.estimate(job)  # fills the caches

    warm_s = median_s([partial(ullage.estimate, job)] * WARM_RUNS)
    new_s = median_s([partial(ullage.estimate, other) for other in unseen[:WARM_RUNS]])
    account_s = median_s([partial(accounts, other) for other in unseen[WARM_RUNS:]])
    cold_command()  # writes the bytecode
    cold_s = median_s([cold_command] * COLD_RUNS)

    print(f"{job.model.name}, {job.layout.world:,} GPUs, every rank")
    for name, seconds, runs, goal_s in (
        ("warm, same job", warm_s, WARM_RUNS, WARM_GOAL_S),
        ("warm, new job", new_s, WARM_RUNS, None),
        ("new job, account", account_s, WARM_RUNS, None),
        ("cold command", cold_s, COLD_RUNS, COLD_GOAL_S),
    ):
        goal = f"   goal {1000 * goal_s:g} ms" if goal_s is not None else ""
        print(f"  {name:<16} {1000 * seconds:9.2f} ms   median of {runs}{goal}")


if __name__ == "__main__":
    main()
