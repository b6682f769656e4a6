"""A configuration that you already have: whether it fits, what contradicts what, what it wastes, and the smallest edit that helps."""

from __future__ import annotations

import argparse

from ullage.cli import status
from ullage.cli.answer import write_json
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import InvalidInput, UllageError

USAGE = "FILE --model M --cluster C [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(parser, metavar="FILE", what="a configuration that ullage reads, or a job file (docs/formats.md)")
    parser.add_argument(
        "--from", dest="source", metavar="FORMAT", help="the file's own format; without it, by its content"
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON (docs/job.md)")
    parser.epilog = f"Exit status: {status.MEANING}."


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import check

    if arguments.job is None:
        raise InvalidInput(
            "is missing", key="FILE", remedy="ullage check ds_config.json --model llama-3.1-8b --cluster 8xH100"
        )
    written = overrides(arguments)
    try:
        found = check(arguments.job, tuple(written), name=arguments.source)
    except UllageError as error:
        raise placed(error, written) from None
    if arguments.json:
        from ullage.report import json

        write_json(json.check(found))
    else:
        from ullage.report.console import to_stdout, write
        from ullage.report.formats import check_report

        console = to_stdout()
        write(check_report(found, width=console.width), console)
    return status.OF_VERDICT[found.estimate.verdict]
