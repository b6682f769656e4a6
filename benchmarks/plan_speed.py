"""How fast a plan's search covers a whole space on this machine: a dense model of 405B, a mixture of experts of 671B.

Seconds of this process's CPU. A strategy is covered when it was timed and its memory accounted for, or when a bound proves that it is
slower than the best or does not fit; tests/planner holds the bounds against the exact account.
"""

from __future__ import annotations

import sys
import time

from ullage.planner.search import Search
from ullage.planner.wanted import bases, wanted

SPACES = {
    "llama-3.1-405b": {
        "cluster": "2048x8xH100-SXM-80GB",
        "data": {"seq_len": 8192, "global_batch": 2048},
    },
    "deepseek-v3": {
        "cluster": "256x8xH100-SXM-80GB",
        "data": {"seq_len": 4096, "global_batch": 15360},
    },
}
GOAL_S = 2.0


def main(names: list[str]) -> None:
    """names: models of SPACES; all where none is given."""
    for name in names or SPACES:
        start = time.process_time()
        want = wanted({"schema": 1, "model": name, **SPACES[name]}, (), ("megatron",))
        found, _ = bases(want)
        search = Search(want=want, bases=found, goal=lambda _, seconds: (seconds,))
        best = search.run()[0]
        seconds = time.process_time() - start
        covered = search.counts.space
        print(f"{name}, {best.job.layout.world:,} GPUs")
        print(
            f"  {covered:,} strategies in {seconds:.1f} s of CPU, {covered / seconds:,.0f} a second   goal {GOAL_S:g} s"
        )
        print(
            f"  timed {search.counts.evaluated:,}, no room {search.counts.infeasible:,}; best step {best.time.step_s:.2f} s"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
