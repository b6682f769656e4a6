"""``python -m tests.distributed.deepspeed_table``: case by case, the estimate against real DeepSpeed steps on CPU processes.

Bytes of the rank that holds most in a steady step: between two steps, at the highest point of its forwards, backwards and reductions,
and of all of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.distributed.deepspeed_cases import CASES, RANKS
from tests.distributed.deepspeed_runs import Case, Held, estimated, job_of, measure
from tests.distributed.world import Failed, run

TIMEOUT_S = 300.0
HEAD = """\
| case | ranks | estimated between / passes / peak | measured | difference |
|---|---|---|---|---|
"""


def line(case: Case, ranks: int, measured: Sequence[Held]) -> str:
    """One of Markdown's."""
    ours = estimated(job_of(case, ranks))[:3]
    real = [max(figures) for figures in zip(*(one[:3] for one in measured), strict=True)]
    gaps = " / ".join(f"{mine / other - 1:+.2%}" for mine, other in zip(ours, real, strict=True))
    return f"| {case} | {ranks} | {_shown(ours)} | {_shown(real)} | {gaps} |\n"


def _shown(sizes: Sequence[int]) -> str:
    return " / ".join(f"{size:,}" for size in sizes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.deepspeed_table", description=__doc__)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of processes, with commas between")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="of this ZeRO stage alone")
    arguments = parser.parse_args(argv)
    failed = 0
    sys.stdout.write(HEAD)
    for ranks in map(int, arguments.ranks.split(",")):
        for case in CASES:
            if arguments.stage not in (None, case.stage):
                continue
            try:
                measured = run(measure, (case, ranks), ranks=ranks, timeout_s=TIMEOUT_S)
            except Failed as error:
                failed += 1
                sys.stderr.write(f"{case}, {ranks} ranks: {error}\n")
                continue
            sys.stdout.write(line(case, ranks, measured))
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
