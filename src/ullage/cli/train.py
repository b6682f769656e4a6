"""A job over its data: texts, JSON lines, Parquet or token files, with checkpoints, metrics and the trained model under --out.

The same command goes on from the latest checkpoint in --out. Starts its own processes, or runs as the rank that torchrun, deepspeed or srun
has started. Needs ullage[train].
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.cli import status
from ullage.cli.answer import write_json, write_report
from ullage.cli.flags import add_job_flags
from ullage.cli.job import job_of
from ullage.errors import Contradiction, Infeasible, InvalidInput, OutOfMemory, UllageError
from ullage.frozen import replace
from ullage.train.settings import LR_SCHEDULES, Training

if TYPE_CHECKING:
    from ullage.engines.estimate import Estimate
    from ullage.job.job import Job
    from ullage.train.answers import Step, Trained

USAGE = "[JOB] --data FILE... --out DIR [options]"
_TERMINAL_S, _LOG_S = 0.1, 10.0
"""Seconds between two lines of progress."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_job_flags(parser)
    default = {one.name: one.default for one in Training.__dataclass_fields__.values()}
    run = parser.add_argument_group("the run")
    run.add_argument(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help=".txt, .jsonl, .parquet; .bin or .npy of tokens",
    )
    run.add_argument("--out", type=Path, metavar="DIR", help="where all that is written goes")
    run.add_argument("--steps", type=int, metavar="N", help="optimizer steps")
    run.add_argument("--epochs", type=int, metavar="N", help="or times over the data (1)")
    run.add_argument("--lr", type=float, default=default["lr"], metavar="RATE", help="highest learning rate (3e-4)")
    run.add_argument(
        "--lr-schedule", default=default["lr_schedule"], metavar="KIND", help=f"{' or '.join(LR_SCHEDULES)}"
    )
    run.add_argument("--warmup-steps", type=int, default=0, metavar="N", help="steps up to the highest rate (0)")
    run.add_argument("--weight-decay", type=float, default=default["weight_decay"], metavar="RATE", help="(0.01)")
    run.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and of the data's order (0)")
    run.add_argument("--weights", type=Path, metavar="FOLDER", help="start from its safetensors (drawn from the seed)")
    run.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="for texts (that of --weights, or of the model)")
    run.add_argument(
        "--save-every", type=int, default=default["save_every"], metavar="N", help="steps between checkpoints (500)"
    )
    run.add_argument("--keep", type=int, default=default["keep"], metavar="N", help="checkpoints that are left (2)")
    run.add_argument("--resume", default="auto", metavar="HOW", help="auto, never, or a checkpoint's folder (auto)")
    run.add_argument("--auto", action="store_true", help="plan first: keys that the job leaves out are free")
    run.add_argument("--on-oom", default="stop", metavar="WHAT", help="stop, or replan: go on with what fits (stop)")
    run.add_argument(
        "--memory-budget", metavar="SIZE", help="what a rank's allocator may hold, such as 2GiB (the card's)"
    )
    run.add_argument("--force", action="store_true", help="start although the estimate does not fit")
    parser.add_argument("--json", action="store_true", help="the answer as JSON (docs/train.md)")
    parser.epilog = (
        "Exit status: 0 trained, 1 the job does not fit and was not started, 2 the input is wrong or the run failed, "
        f"{status.RAN_OUT} it ran out of memory."
    )


def run(arguments: argparse.Namespace) -> int:
    from ullage.train.places import is_first
    from ullage.train.replan import with_budget
    from ullage.train.run import fit, refuse

    training = _training(arguments)
    try:
        job = _planned(arguments) if arguments.auto else job_of(arguments, "train")
    except Infeasible as error:
        if error.key != "--auto":
            raise
        sys.stderr.write(f"ullage: not started: {error}\n")
        return status.OF_VERDICT["oom"]
    refuse(job)
    job = with_budget(job, training.memory_budget)
    expected = fit(job)
    if expected is not None and expected.verdict == "oom" and not training.force:
        if is_first():
            _refused(expected, as_json=arguments.json)
        return status.OF_VERDICT["oom"]
    if is_first():
        _warned(job, expected)
    found, job = _trained(arguments, job, training)
    if isinstance(found, OutOfMemory):
        _explained(found, job, as_json=arguments.json)
        return status.RAN_OUT
    if found is None:  # a rank that another one speaks for
        return 0
    if arguments.json:
        from ullage.report import json

        write_json(json.trained(found))
    else:
        from ullage.report.training import trained_report

        write_report(trained_report(found, job))
    return 0


def _trained(arguments: argparse.Namespace, job: Job, training: Training) -> tuple[Trained | OutOfMemory | None, Job]:
    """The answer, or why memory ran out; and the job that ran last."""
    from ullage.api import train
    from ullage.train.replan import following
    from ullage.train.run import fit

    while True:
        expected = fit(job)
        predicted = None if expected is None else expected.peak.allocated_bytes
        line = Line(predicted, job.cluster.device.capacity_bytes, sys.stderr.isatty())
        try:
            return train(job, training, line), job
        except OutOfMemory as error:
            other = following(error, job) if arguments.on_oom == "replan" else None
            if other is None:
                return error, job
            job, advice = other
            training = replace(training, resume="auto")
            sys.stderr.write(f"{error}; goes on with another plan: {advice.what}\n")
        except (UllageError, KeyboardInterrupt):
            if line.terminal:
                sys.stderr.write("\n")  # what comes is no part of the progress
            raise


class Line:
    """The progress on stderr: one line that is written over on a terminal, one in ten seconds elsewhere. It goes to rank 0's process."""

    def __init__(self, predicted_bytes: int | None, capacity_bytes: int, terminal: bool) -> None:
        self.predicted_bytes, self.capacity_bytes, self.terminal = predicted_bytes, capacity_bytes, terminal
        self._next, self._width = 0.0, 0

    def __call__(self, step: Step) -> None:
        from ullage.report.training import step_line

        last = step.step == step.steps
        if time.monotonic() < self._next and not last:
            return
        self._next = time.monotonic() + (_TERMINAL_S if self.terminal else _LOG_S)
        line = step_line(step, self.predicted_bytes, self.capacity_bytes)
        over = "\r" if self.terminal else ""
        end = "\n" if last or not self.terminal else ""
        sys.stderr.write(f"{over}{line:<{self._width}}{end}")
        sys.stderr.flush()
        self._width = len(line) if self.terminal else 0


def _training(arguments: argparse.Namespace) -> Training:
    if arguments.out is None:
        raise InvalidInput(
            "names no folder", key="--out", remedy="checkpoints, metrics and the model are written there"
        )
    return Training(
        data=tuple(arguments.data),
        out=arguments.out,
        steps=arguments.steps,
        epochs=arguments.epochs,
        lr=arguments.lr,
        lr_schedule=arguments.lr_schedule,
        warmup_steps=arguments.warmup_steps,
        weight_decay=arguments.weight_decay,
        seed=arguments.seed,
        weights=arguments.weights,
        tokenizer=arguments.tokenizer,
        save_every=arguments.save_every,
        keep=arguments.keep,
        resume=arguments.resume,
        force=arguments.force,
        memory_budget=_budget(arguments),
    )


def _budget(arguments: argparse.Namespace) -> int | None:
    from ullage.train.places import place
    from ullage.units import parse_bytes

    if arguments.on_oom not in ("stop", "replan"):
        raise InvalidInput("is no end", key="--on-oom", value=arguments.on_oom, allowed="stop, replan")
    if arguments.on_oom == "replan" and place() is not None:
        raise Contradiction(
            "starts other processes, and these are a launcher's", key="--on-oom", value="replan", remedy="leave it out"
        )
    return None if arguments.memory_budget is None else parse_bytes(arguments.memory_budget, "--memory-budget")


def _planned(arguments: argparse.Namespace) -> Job:
    """The best plan that is run here."""
    from ullage.cli.flags import overrides, placed
    from ullage.train.auto import chosen
    from ullage.train.places import is_first

    said, arguments.engine = arguments.engine, None
    written = overrides(arguments)
    try:
        plan = chosen({} if arguments.job is None else arguments.job, tuple(written), said)
    except UllageError as error:
        raise placed(error, written) from None
    if is_first():
        sys.stderr.write(f"planned: {plan.strategy}\n")
    return plan.job


def _refused(expected: Estimate, *, as_json: bool) -> None:
    if as_json:
        from ullage.report import json

        write_json(json.estimate(expected))
    else:
        from ullage.report.console import to_stdout, write
        from ullage.report.terminal import estimate_report

        console = to_stdout()
        write(estimate_report(expected, width=console.width, ascii_only=console.options.ascii_only), console)
    sys.stderr.write(
        "ullage: not started: the job does not fit; ullage plan finds what does, --force starts it all the same\n"
    )


def _warned(job: Job, expected: Estimate | None) -> None:
    """What a person should know before the first step."""
    from ullage.train.run import on_gpus

    if expected is None:
        sys.stderr.write("warning: no account of this job, so none of whether it fits\n")
    elif expected.verdict != "fits":
        sys.stderr.write(f"warning: the estimate says {expected.verdict}; it may run out of memory\n")
    if not on_gpus():
        count = job.layout.world
        what = f"{count} CPU processes with gloo, one for each GPU of the job" if count > 1 else "the CPU"
        sys.stderr.write(f"no GPU here: trained on {what}\n")


def _explained(error: OutOfMemory, job: Job, *, as_json: bool) -> None:
    """What ``ullage why`` says of it, with the job."""
    from ullage.api import why

    answer = why(str(error.value), job)
    if as_json:
        from ullage.report.why_json import why as told

        write_json(told(answer))
    else:
        from ullage.report.why import why_report

        write_report(why_report(answer))
    sys.stdout.flush()
    sys.stderr.write(f"\nullage: {error}\n")
