"""A technique on a job, step by step, with the bytes that each rank sends and holds: the numbers of the estimate and of the time."""

from __future__ import annotations

import argparse
import json as text
import sys
from pathlib import Path

from ullage.cli import status
from ullage.cli.answer import save, write_json
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import InvalidInput, UllageError
from ullage.techniques.registry import TECHNIQUES
from ullage.techniques.told import Shown

USAGE = "TECHNIQUE [JOB] [options]"
FORMATS = {
    "terminal": "tables, a pipeline's step as a Gantt chart",
    "json": "the same numbers",
    "html": "of a pipeline: one file with the chart as SVG",
    "perfetto": "of a pipeline: a trace for ui.perfetto.dev",
}
_DRAWN = ("html", "perfetto")


def configure(parser: argparse.ArgumentParser) -> None:
    techniques = "; ".join(f"{name}: {what}" for name, what in TECHNIQUES.items())
    parser.add_argument("technique", nargs="?", metavar="TECHNIQUE", help=techniques)
    forms = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    parser.add_argument("--format", choices=FORMATS, default="terminal", help=forms)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where a drawing is written")
    parser.add_argument("--rank", type=int, metavar="STAGE", help="the pipeline stage; without it the one of the peak")
    add_job_flags(parser)
    parser.epilog = (
        f"Exit status: 0, or {status.WRONG_INPUT} where the input is wrong or the job does not use the technique."
    )


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import read_job, show

    _check(arguments)
    written = overrides(arguments)
    try:
        job = read_job({} if arguments.job is None else arguments.job, tuple(written))
    except UllageError as error:
        raise placed(error, written) from None
    found = show(arguments.technique, job, stage=arguments.rank)
    if arguments.format == "json":
        from ullage.report import json

        write_json(json.shown(found))
    elif arguments.format in _DRAWN:
        _draw(found, arguments)
    else:
        from ullage.report.console import to_stdout, write
        from ullage.report.show import show_report

        console = to_stdout()
        write(show_report(found, width=console.width, ascii_only=console.options.ascii_only), console)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from ullage.techniques.registry import known

    if arguments.technique is None:
        raise InvalidInput("is missing", key="TECHNIQUE", allowed=", ".join(TECHNIQUES))
    known(arguments.technique)
    if arguments.job is None and not overrides(arguments):
        raise InvalidInput("no job", allowed="a job file, or flags: --model and --cluster", key="ullage show")
    drawn = arguments.format in _DRAWN
    if drawn and arguments.technique != "pipeline":
        allowed = ", ".join(form for form in FORMATS if form not in _DRAWN)
        raise InvalidInput("draws a pipeline", key="--format", value=arguments.format, allowed=allowed)
    if drawn and arguments.out is None:
        raise InvalidInput("is missing", key="--out", allowed="a file")
    if arguments.out is not None and not drawn:
        raise InvalidInput("goes with --format html or perfetto", key="--out", value=str(arguments.out))


def _draw(found: Shown, arguments: argparse.Namespace) -> None:
    from ullage.report.gantt_html import page
    from ullage.report.perfetto import pipeline
    from ullage.units import format_seconds

    assert found.gantt is not None, found.technique
    if arguments.format == "html":
        drawn = page(found)
    else:
        drawn = text.dumps(pipeline(found.gantt, title=found.job.model.name), separators=(",", ":"))
    save(arguments.out, drawn)
    stages, passes = len(found.gantt.ranks), sum(map(len, found.gantt.ranks))
    sys.stdout.write(f"{arguments.out}: {stages} stages, {passes:,} passes, {format_seconds(found.gantt.end_s)}\n")
