"""A command's job, from its file and its flags; and the settings of a run, for the commands that run one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.cli.flags import overrides, placed
from ullage.errors import InvalidInput, UllageError

if TYPE_CHECKING:
    from ullage.job.job import Job
    from ullage.train.settings import Settings


def job_of(arguments: argparse.Namespace, command: str) -> Job:
    from ullage.api import read_job

    written = overrides(arguments)
    if arguments.job is None and not written:
        raise InvalidInput(
            "no job", allowed="a job file, or flags: --model and --cluster at least", key=f"ullage {command}"
        )
    try:
        return read_job({} if arguments.job is None else arguments.job, tuple(written))
    except UllageError as error:
        raise placed(error, written) from None


def add_run_flags(parser: argparse.ArgumentParser, *, steps: int, data: str) -> None:
    """What a run has beside its job. steps: as many by default; data: what there is without --data."""
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--data", nargs="+", type=Path, default=[], metavar="FILE", help=f"token files, .bin or .npy ({data})"
    )
    group.add_argument("--steps", type=int, default=steps, metavar="N", help=f"optimizer steps ({steps})")
    group.add_argument("--lr", type=float, default=3e-4, metavar="RATE", help="learning rate (3e-4)")
    group.add_argument("--weight-decay", type=float, default=0.01, metavar="RATE", help="of AdamW (0.01)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and of the data's order (0)")
    group.add_argument(
        "--weights", type=Path, metavar="FOLDER", help="start from its safetensors (drawn from the seed)"
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    from ullage.train.settings import Settings

    return Settings(
        steps=arguments.steps,
        lr=arguments.lr,
        weight_decay=arguments.weight_decay,
        seed=arguments.seed,
        data=tuple(arguments.data),
        weights=arguments.weights,
    )
