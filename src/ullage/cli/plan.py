"""The strategy that fits and is best, found among all that the job leaves open: engine, degrees, ZeRO stage, micro-batch, recomputation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ullage.cli import status
from ullage.cli.answer import save, write_json, write_report
from ullage.cli.flags import add_job_flags, overrides, placed
from ullage.errors import Contradiction, InvalidInput, UllageError
from ullage.planner.goals import GOALS

USAGE = "[JOB] [options]"


def configure(parser: argparse.ArgumentParser) -> None:
    goals = "; ".join(f"{name}: {what}" for name, what in GOALS.items())
    parser.add_argument("--goal", default="fastest", metavar="GOAL", help=f"{goals} (default: fastest)")
    parser.add_argument(
        "--fix", action="append", default=[], metavar="KEY=VALUE", help="a key that is not free: --fix layout.tp=8"
    )
    parser.add_argument("--top", type=int, default=3, metavar="N", help="how many plans to tell (default: 3)")
    parser.add_argument("--exhaustive", action="store_true", help="time and replay every strategy: a proof, and slow")
    parser.add_argument(
        "--tight", action="store_true", help="strategies whose estimate straddles the capacity count too"
    )
    parser.add_argument("--json", action="store_true", help="the answer as JSON (docs/job.md)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the best plan is written as a job file")
    add_job_flags(parser, what="a job file whose missing keys are free")
    parser.epilog = (
        "Exit status: 0 a plan fits, 1 nothing fits, 2 the input is wrong, 3 the best plan is tight (--tight)."
    )


def run(arguments: argparse.Namespace) -> int:
    from ullage.api import plan

    engines = _engines(arguments)
    written = {**overrides(arguments), **dict(_fixed(arguments.fix))}
    if arguments.job is None and not written:
        raise InvalidInput(
            "no job", allowed="a job file, or flags: --model, --cluster and --global-batch at least", key="ullage plan"
        )
    try:
        found = plan(
            {} if arguments.job is None else arguments.job,
            tuple(written),
            goal=arguments.goal,
            engines=engines,
            top=arguments.top,
            exhaustive=arguments.exhaustive,
            tight=arguments.tight,
        )
    except UllageError as error:
        raise placed(error, written) from None
    if arguments.out is not None and found.plans:
        from ullage.formats import job_file

        save(arguments.out, job_file.write(job_file.leaves(found.plans[0].job), (found.plans[0].strategy,)))
    if arguments.json:
        from ullage.report import json

        write_json(json.planned(found))
    else:
        from ullage.report.plan import plan_report

        write_report(plan_report(found))
    return status.OF_VERDICT[found.plans[0].estimate.verdict if found.plans else "oom"]


def _engines(arguments: argparse.Namespace) -> tuple[str, ...]:
    """``--engine`` names those to search, and is no key of the job."""
    said, arguments.engine = arguments.engine, None
    return tuple(name.strip() for name in said.split(",") if name.strip()) if said else ()


def _fixed(settings: list[str]) -> Iterator[tuple[str, str]]:
    """Each ``--fix`` as an assignment; two of one key that differ exclude each other."""
    known: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InvalidInput("is no assignment", key="--fix", value=setting[:60], allowed="KEY=VALUE")
        if known.setdefault(key.strip(), value.strip()) != value.strip():
            raise Contradiction(
                f"is fixed to {known[key.strip()]} too", key=key.strip(), value=value.strip(), remedy="keep one --fix"
            )
        yield setting, f"--fix {setting}"
