"""A few steps of a job on its ranks, and what each held at its highest, against the estimate; with --out as a truth record.

Starts its own processes, or runs as the rank that torchrun, deepspeed or srun has started. Needs ullage[train].
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ullage.cli.answer import save, write_json, write_report
from ullage.cli.flags import add_job_flags
from ullage.cli.job import add_run_flags, job_of, settings_of

USAGE = "[JOB] [options]"
_STEPS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(parser)
    add_run_flags(parser, steps=_STEPS, data="random tokens from the seed")
    parser.add_argument("--json", action="store_true", help="the answer as JSON (docs/train.md)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="a file of one truth record (docs/job.md), for ullage validate"
    )
    parser.epilog = (
        "Exit status: 0 within the bound, 1 not, 2 the input is wrong. --steps are timed, after two that are recorded."
    )


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import measure
    from ullage.train.calibrated import writable

    job = job_of(arguments, "measure")
    if arguments.out is not None:
        writable(arguments.out)
    found = measure(job, settings_of(arguments))
    if found is None:  # a rank that another one speaks for
        return 0
    if arguments.out is not None:
        from ullage.report.truth import records

        save(arguments.out, records(found, job))
    if arguments.json:
        from ullage.report import json

        write_json(json.measured(found))
    else:
        from ullage.report.training import measured_report

        write_report(measured_report(found, job))
    return 0 if found.within else 1
