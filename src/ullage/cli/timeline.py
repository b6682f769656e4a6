"""A job's memory over a step, drawn: a page, a Perfetto trace, or a snapshot for torch's own viewer. Or a real snapshot, read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import Contradiction, InvalidInput, UllageError
from ullage.job.job import Job
from ullage.report.timeline_picture import FORMATS

USAGE = "[JOB] --format FORMAT --out FILE [options], or --snapshot FILE [JOB]"


def configure(parser: argparse.ArgumentParser) -> None:
    forms = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    parser.add_argument("--format", choices=FORMATS, help=forms)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the picture is written")
    parser.add_argument("--rank", type=int, metavar="STAGE", help="the pipeline stage; without it the one of the peak")
    parser.add_argument("--history", action="store_true", help="load, first and second step, not one step alone")
    parser.add_argument(
        "--snapshot",
        type=Path,
        metavar="FILE",
        help="a snapshot that torch dumped: what it holds, beside the job if one is given",
    )
    parser.add_argument("--device", type=int, metavar="N", help="with --snapshot: the GPU; without it the fullest one")
    add_job_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.snapshot is not None:
        return _read(arguments)
    if arguments.device is not None:
        raise InvalidInput("goes with --snapshot", key="--device", value=arguments.device)
    if arguments.format is None or arguments.out is None:
        missing = "--format" if arguments.format is None else "--out"
        raise InvalidInput("is missing", key=missing, allowed=", ".join(FORMATS) if missing == "--format" else "a file")
    job = _job(arguments)
    if job is None:
        raise InvalidInput("no job", allowed="a job file, or flags: --model and --cluster", key="ullage timeline")
    return _draw(job, arguments)


def _job(arguments: argparse.Namespace) -> Job | None:
    from ullage.api import read_job

    written = overrides(arguments)
    if arguments.job is None and not written:
        return None
    try:
        return read_job({} if arguments.job is None else arguments.job, tuple(written))
    except UllageError as error:
        raise placed(error, written) from None


def _draw(job: Job, arguments: argparse.Namespace) -> int:
    from ullage.report.timeline_job import job_timeline, picture_of
    from ullage.report.timeline_picture import save
    from ullage.report.words import in_gib

    found = job_timeline(job, stage=arguments.rank, history=arguments.history)
    save(picture_of(found), arguments.format, arguments.out)
    highest = found.top
    sys.stdout.write(
        f"{arguments.out}: {found.title}; {len(found.timeline.events):,} events, peak {in_gib(highest.bytes)} allocated "
        f"in {highest.moment}\n"
    )
    return 0


def _read(arguments: argparse.Namespace) -> int:
    from ullage.postmortem.snapshot import read_snapshot, summarise
    from ullage.report.console import to_stdout, write
    from ullage.report.timeline_snapshot import comparison_report, snapshot_report

    for name, given in (("--format", arguments.format), ("--out", arguments.out), ("--history", arguments.history)):
        if given:
            raise Contradiction("draws a job, and --snapshot reads a run", key=name, remedy="keep one")
    job = _job(arguments)
    snapshot = read_snapshot(arguments.snapshot)
    if job is None:
        write(snapshot_report(summarise(snapshot, device=arguments.device)), to_stdout())
    else:
        from ullage.api import estimate
        from ullage.postmortem.snapshot_compare import compare

        found = compare(snapshot, estimate(job), device=arguments.device, stage=arguments.rank)
        write(comparison_report(found), to_stdout())
    return 0
