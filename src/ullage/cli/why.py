"""What ran out of memory, why, and what helps: from a message, a log, a memory summary or a snapshot, with the job or without."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ullage.cli import status
from ullage.cli.answer import write_json, write_report
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import Contradiction, InvalidInput, UllageError
from ullage.units import gib

if TYPE_CHECKING:
    from ullage.job.job import Job

USAGE = "INPUT [--against SNAPSHOT] [--job JOB | --config FILE --model M --cluster C] [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(
        parser,
        metavar="INPUT",
        what="a message; a file or a folder of logs (gzip too), a memory_summary(), a snapshot; or - for standard input",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--job", dest="job_file", metavar="JOB", help="the job that ran: a job file (docs/job.md)")
    source.add_argument("--config", metavar="FILE", help="or the configuration it ran with (docs/formats.md)")
    parser.add_argument(
        "--against",
        metavar="SNAPSHOT",
        help="an earlier snapshot, where INPUT is one: what is held more, largest first",
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON (docs/job.md)")
    parser.epilog = "Exit status: 0 no failure of memory found, 1 out of memory, 2 the input is wrong."


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import why

    if arguments.job is None:
        raise InvalidInput("is missing", key="INPUT", remedy="ullage why train.log, or ullage why - < train.log")
    written = overrides(arguments)
    progress = _progress if sys.stderr.isatty() else None
    try:
        if arguments.config is not None:
            answer = why(
                arguments.job,
                against=arguments.against,
                config=arguments.config,
                overrides=tuple(written),
                progress=progress,
            )
        else:
            answer = why(arguments.job, _job(arguments, written), against=arguments.against, progress=progress)
    except UllageError as error:
        raise placed(error, written) from None
    if arguments.json:
        from ullage.report.why_json import why as as_json

        write_json(as_json(answer))
    else:
        from ullage.report.why import why_report

        write_report(why_report(answer))
    return status.OF_VERDICT["oom"] if answer.evidence.ran_out else 0


def _job(arguments: argparse.Namespace, written: dict[str, str]) -> Job | None:
    from ullage.api import read_job

    if arguments.job_file is not None:
        return read_job(arguments.job_file, tuple(written))
    if not written:
        return None
    if arguments.model is None and arguments.cluster is None:
        raise Contradiction(
            "change a job, and none is given",
            key=next(iter(written.values())),
            remedy="add --job, or --model and --cluster",
        )
    return read_job({}, tuple(written))


def _progress(done: int, size: int | None) -> None:
    of = f" of {gib(size):.2f}" if size is not None else ""
    end = "\n" if done == size else ""
    sys.stderr.write(f"\r{gib(done):.2f}{of} GiB read{end}")
    sys.stderr.flush()
