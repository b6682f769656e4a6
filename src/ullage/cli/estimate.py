"""What every rank of a job will hold at its worst moment, as an account that adds up to the byte, and whether it fits."""

from __future__ import annotations

import argparse

from ullage.cli import status
from ullage.cli.answer import write_json
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import InvalidInput, UllageError

USAGE = "[JOB] [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the answer as JSON (docs/job.md)")
    form.add_argument("--explain", action="store_true", help="each line with its formula, its source and its life")
    parser.epilog = f"Exit status: {status.MEANING}."


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import estimate, read_job

    written = overrides(arguments)
    if arguments.job is None and not written:
        raise InvalidInput(
            "no job", allowed="a job file, or flags: --model and --cluster at least", key="ullage estimate"
        )
    try:
        job = read_job({} if arguments.job is None else arguments.job, tuple(written))
    except UllageError as error:
        raise placed(error, written) from None
    answer = estimate(job)
    if arguments.json:
        from ullage.report import json

        write_json(json.estimate(answer))
    else:
        from ullage.report.console import to_stdout, write
        from ullage.report.explain import explained_report
        from ullage.report.terminal import estimate_report

        console = to_stdout()
        report = explained_report if arguments.explain else estimate_report
        write(report(answer, width=console.width, ascii_only=console.options.ascii_only), console)
    return status.OF_VERDICT[answer.verdict]
