"""Runs two steps of real code on fake tensors and says what every allocation was for: any module by a factory, or a job's own model.

module:function (or file.py:function) names a function of your own that returns (model, optimizer or None, a function that runs one
step). A job's model is the installed transformers' class; nothing is downloaded and no weights are made. Needs ullage[torch].
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ullage.cli import status
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import InvalidInput, UllageError, Unsupported

if TYPE_CHECKING:
    from ullage.trace.events import Trace

USAGE = "module:function | [--model PATH_OR_NAME] [JOB] [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(parser)
    parser.add_argument("--world", type=int, default=1, metavar="N", help="of a factory: run it as one rank of N")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="which rank (0)")
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
    parser.epilog = f"Exit status: {status.MEANING}."


def run(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1 or arguments.world < 1:
        key, value = ("--steps", arguments.steps) if arguments.steps < 1 else ("--world", arguments.world)
        raise InvalidInput("is not possible", key=key, value=value, allowed="1 and more")
    if find_spec("torch") is None:
        raise Unsupported("is not installed", key="torch", remedy="pip install 'ullage[torch]'")
    if arguments.estimate is not None:
        return _estimate(arguments)
    found = _of_factory(arguments) if is_factory(arguments.job) else _of_job(arguments)
    if arguments.json:
        from ullage.report.json import dumps
        from ullage.report.trace import as_dict

        sys.stdout.write(dumps(as_dict(found)) + "\n")
    else:
        from ullage.report.console import to_stdout, write
        from ullage.report.trace import trace_report

        console = to_stdout()
        write(trace_report(found, width=console.width), console)
    return 0


def _estimate(arguments: argparse.Namespace) -> int:
    """The account of a traced module under a job's engine, layout and recipe."""
    from ullage.api import as_dict, estimate
    from ullage.trace.graph import graph_of, job_of
    from ullage.trace.run import factory_named, trace

    if not is_factory(arguments.job):
        raise InvalidInput("goes with a factory", key="--estimate", value=arguments.estimate, allowed="module:function")
    job = job_of(arguments.estimate, arguments.job)
    found = trace(
        factory_named(arguments.job), name=arguments.job, steps=arguments.steps, like=arguments.like, ops=True
    )
    answer = estimate(job, graph_of(found))
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

    written = overrides(arguments)
    if written:
        raise InvalidInput(
            "goes with a job, and this is a factory", key=next(iter(written.values())), remedy="leave it out"
        )
    return trace(
        factory_named(arguments.job),
        name=arguments.job,
        steps=arguments.steps,
        rank=arguments.rank,
        world=arguments.world,
        like=arguments.like,
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
        rank=arguments.rank,
        world=job.layout.world,
        like=arguments.like,
    )
