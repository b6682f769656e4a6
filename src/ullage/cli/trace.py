"""Runs two steps of real code on fake tensors and says what every allocation was for: any module by a factory, or a job's own model.

module:function (or file.py:function) names a function of your own that returns (model, optimizer or None, a function that runs one
step). A job's model is the installed transformers' class; nothing is downloaded and no weights are made. Needs ullage[torch].
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.cli import status
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import Contradiction, InvalidInput, UllageError, Unsupported
from ullage.report.timeline_picture import FORMATS

if TYPE_CHECKING:
    from ullage.trace.events import Trace

USAGE = "module:function | [--model PATH_OR_NAME] [JOB] [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(parser)
    parser.add_argument("--world", type=int, metavar="N", help="of a factory: run it as one rank of N (1)")
    parser.add_argument("--rank", type=int, metavar="N", help="which rank (0)")
    parser.add_argument(
        "--steps", type=int, default=2, metavar="N", help="steps to run (2: the second is the steady one)"
    )
    parser.add_argument(
        "--like",
        choices=("cuda", "cpu"),
        default="cuda",
        help="whose defaults torch takes where it asks the device (cuda)",
    )
    parser.add_argument(
        "--estimate",
        metavar="JOB",
        help="of a factory: what the traced module will hold under a job (its own model is not read)",
    )
    parser.add_argument("--json", action="store_true", help="the trace as JSON, every allocation with its life")
    parser.add_argument("--format", choices=FORMATS, help="draws the trace, as ullage timeline draws a job")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --format: where the picture is written")
    parser.epilog = f"Exit status: {status.MEANING}."


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if find_spec("torch") is None:
        raise Unsupported("is not installed", key="torch", remedy="pip install 'ullage[torch]'")
    if arguments.estimate is not None:
        return _estimate(arguments)
    found = _of_factory(arguments) if is_factory(arguments.job) else _of_job(arguments)
    if arguments.format is not None:
        from ullage.report.timeline_picture import save
        from ullage.report.timeline_trace import picture_of_trace
        from ullage.report.words import in_gib

        save(picture_of_trace(found), arguments.format, arguments.out)
        peak = found.steady
        sys.stdout.write(
            f"{arguments.out}: {found.name}; {len(found.allocations):,} allocations, peak {in_gib(peak.bytes)} in {peak.phase}\n"
        )
    elif arguments.json:
        from ullage.report.json import dumps
        from ullage.report.trace import as_dict

        sys.stdout.write(dumps(as_dict(found)) + "\n")
    else:
        from ullage.report.console import to_stdout, write
        from ullage.report.trace import trace_report

        console = to_stdout()
        write(trace_report(found, width=console.width), console)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """What does not go together, before torch is loaded."""
    for key, value, least in (
        ("--steps", arguments.steps, 1),
        ("--world", arguments.world, 1),
        ("--rank", arguments.rank, 0),
    ):
        if value is not None and value < least:
            raise InvalidInput("is not possible", key=key, value=value, allowed=f"{least} and more")
    if (arguments.format is None) != (arguments.out is None):
        key, other = ("--format", "--out") if arguments.out is None else ("--out", "--format")
        raise InvalidInput(f"goes with {other}", key=key, remedy="give both: --format html --out trace.html")
    if arguments.format is not None and arguments.json:
        raise Contradiction("is another form of the answer than --format", key="--json", remedy="keep one")
    if not is_factory(arguments.job):
        if arguments.estimate is not None:
            raise InvalidInput(
                "goes with a factory", key="--estimate", value=arguments.estimate, allowed="module:function"
            )
        if arguments.world is not None:
            remedy = "leave it out: a job's layout says how many ranks there are"
            raise InvalidInput("goes with a factory", key="--world", value=arguments.world, remedy=remedy)
    elif arguments.estimate is not None:
        for key, given in (("--world", arguments.world), ("--rank", arguments.rank), ("--format", arguments.format)):
            if given is not None:
                raise Contradiction("is of a trace, and --estimate answers for a job", key=key, remedy="leave it out")


def _estimate(arguments: argparse.Namespace) -> int:
    """The account of a traced module under a job's engine, layout and recipe."""
    from ullage.api import as_dict, estimate
    from ullage.trace.graph import graph_of, job_of, told_apart
    from ullage.trace.run import factory_named, trace

    _refuse_flags(arguments)
    job = job_of(arguments.estimate, arguments.job)
    found = trace(
        factory_named(arguments.job), name=arguments.job, steps=arguments.steps, like=arguments.like, ops=True
    )
    graph = graph_of(found)
    answer = estimate(told_apart(job, graph), graph)
    if arguments.json:
        from ullage.report.json import dumps

        sys.stdout.write(dumps(as_dict(answer)) + "\n")
    else:
        from ullage.report.console import to_stdout, write
        from ullage.report.terminal import estimate_report

        console = to_stdout()
        write(estimate_report(answer, width=console.width, ascii_only=console.options.ascii_only), console)
    return status.OF_VERDICT[answer.verdict]


def is_factory(spec: str | None) -> bool:
    """``module:function``; a job file's path has a colon nowhere but in a drive letter."""
    return spec is not None and ":" in spec[2:]


def _of_factory(arguments: argparse.Namespace) -> Trace:
    from ullage.trace.run import factory_named, trace

    _refuse_flags(arguments)
    return trace(
        factory_named(arguments.job),
        name=arguments.job,
        steps=arguments.steps,
        rank=arguments.rank or 0,
        world=arguments.world or 1,
        like=arguments.like,
    )


def _refuse_flags(arguments: argparse.Namespace) -> None:
    written = overrides(arguments)
    if written:
        raise InvalidInput(
            "goes with a job, and this is a factory", key=next(iter(written.values())), remedy="leave it out"
        )


def _of_job(arguments: argparse.Namespace) -> Trace:
    from ullage.api import read_job

    written = overrides(arguments)
    if arguments.job is None and not written:
        raise InvalidInput(
            "nothing to trace",
            allowed="module:function, a job file, or --model and --cluster at least",
            key="ullage trace",
        )
    try:
        job = read_job({} if arguments.job is None else arguments.job, tuple(written))
    except UllageError as error:
        raise placed(error, written) from None
    from ullage.trace.models import factory_of
    from ullage.trace.run import trace

    return trace(
        factory_of(job),
        name=f"{job.model.name}, {job.engine.name}",
        steps=arguments.steps,
        rank=arguments.rank or 0,
        world=job.layout.world,
        like=arguments.like,
    )
