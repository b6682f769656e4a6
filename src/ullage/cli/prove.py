"""A job run on its ranks and on one device, from the same seed on the same tokens: losses, gradient norms and final weights compared.

Starts its own processes, or runs as the rank that torchrun, deepspeed or srun has started. Needs ullage[train].
"""

from __future__ import annotations

import argparse

from ullage.cli.answer import write_json, write_report
from ullage.cli.flags import add_job_flags
from ullage.cli.job import add_run_flags, job_of, settings_of

USAGE = "[JOB] [options]"
_STEPS = 20


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(parser)
    add_run_flags(parser, steps=_STEPS, data="random tokens from the seed")
    parser.add_argument("--json", action="store_true", help="the answer as JSON (docs/train.md)")
    parser.epilog = "Exit status: 0 equal, 1 not equal, 2 the input is wrong."


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import prove

    job = job_of(arguments, "prove")
    found = prove(job, settings_of(arguments))
    if found is None:  # a rank that another one speaks for
        return 0
    if arguments.json:
        from ullage.report import json

        write_json(json.proof(found))
    else:
        from ullage.report.training import proof_report

        write_report(proof_report(found, job))
    return 0 if found.equal else 1
