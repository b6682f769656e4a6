"""Flags that build a job, or change one: each stands for a key of the job file, and its value is written as there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from ullage.errors import Contradiction, InvalidInput, UllageError


class Flag(NamedTuple):
    """``name`` sets ``key``; a switch takes no value and has a --no- twin."""

    name: str
    key: str
    shown: str
    switch: bool = False


FLAGS = (
    Flag("--model", "model", "NAME"),
    Flag("--cluster", "cluster", "8xH100-SXM-80GB"),
    Flag("--calibration", "cluster.device", "FILE"),
    Flag("--seq-len", "data.seq_len", "N"),
    Flag("--micro-batch", "data.micro_batch", "N"),
    Flag("--grad-accum", "data.grad_accum", "N"),
    Flag("--global-batch", "data.global_batch", "N"),
    Flag("--padding-mask", "data.padding_mask", "", switch=True),
    Flag("--dp", "layout.dp", "N"),
    Flag("--tp", "layout.tp", "N"),
    Flag("--sp", "layout.sp", "", switch=True),
    Flag("--cp", "layout.cp", "N"),
    Flag("--cp-kind", "layout.cp_kind", "KIND"),
    Flag("--pp", "layout.pp", "N"),
    Flag("--vpp", "layout.vpp", "N"),
    Flag("--schedule", "layout.schedule", "NAME"),
    Flag("--pp-split", "layout.pp_split", "[N, N]"),
    Flag("--ep", "layout.ep", "N"),
    Flag("--etp", "layout.etp", "N"),
    Flag("--engine", "engine.name", "NAME"),
    Flag("--zero-stage", "engine.zero_stage", "N"),
    Flag("--shard-group", "engine.shard_group", "N"),
    Flag("--stack", "stack", "NAME"),
    Flag("--stack-version", "stack_version", "VERSION"),
    Flag("--precision", "precision", "NAME"),
    Flag("--optimizer", "optimizer", "NAME"),
    Flag("--grad-clip", "grad_clip", "", switch=True),
    Flag("--recompute", "recompute", "none|full|selective"),
    Flag("--attention", "attention", "KERNEL"),
    Flag("--loss", "loss", "KIND"),
    Flag("--offload", "offload", "{optimizer: cpu}"),
    Flag("--lora", "lora", "{rank: 8}"),
    Flag("--compile", "compile", "", switch=True),
)


def add_job_flags(
    parser: argparse.ArgumentParser,
    *,
    metavar: str = "JOB",
    what: str = "a job file: YAML, TOML or JSON (docs/job.md)",
) -> None:
    """JOB, ``--set``, ``--option`` and one flag for each common key."""
    parser.add_argument("job", nargs="?", metavar=metavar, help=what)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of the job: --set layout.tp=2"
    )
    group = parser.add_argument_group(
        "flags that build a job, or change the file's", "Values are written as in a job file; --set comes last."
    )
    for flag in FLAGS:
        if flag.switch:
            group.add_argument(flag.name, action=argparse.BooleanOptionalAction, default=None, help=flag.key)
        else:
            group.add_argument(flag.name, metavar=flag.shown, help=flag.key)
    group.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="engine.options.NAME")


def overrides(arguments: argparse.Namespace) -> dict[str, str]:
    """``key=value`` for read_job, in order -> how it was written."""
    if arguments.grad_accum is not None and arguments.global_batch is not None:
        raise Contradiction(
            "says how many micro-batches a step has, and so does --grad-accum", key="--global-batch", remedy="keep one"
        )
    found = dict(_flags(arguments))
    for option in arguments.option:
        if "=" not in option:
            raise InvalidInput("is no assignment", key="--option", value=option[:60], allowed="NAME=VALUE")
        found[f"engine.options.{option}"] = f"--option {option}"
    found.update((setting, f"--set {setting}") for setting in arguments.set)
    return found


def _flags(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for flag in FLAGS:
        value = getattr(arguments, flag.name.removeprefix("--").replace("-", "_"))
        if isinstance(value, bool):
            yield f"{flag.key}={str(value).lower()}", flag.name if value else f"--no-{flag.name.removeprefix('--')}"
        elif value is not None:
            if flag.name == "--calibration" and not value.endswith(".toml"):
                raise InvalidInput(
                    "is no calibration file, whose name ends in .toml",
                    key=flag.name,
                    value=value[:60],
                    remedy="ullage bench --out machine.toml writes one",
                )
            yield f"{flag.key}={value}", f"{flag.name} {value}"


def placed(error: UllageError, written: dict[str, str]) -> UllageError:
    """The error with its place as the user wrote it: ``--tp 3`` and not ``--set layout.tp=3``."""
    if error.place is not None and error.place.startswith("--set "):
        error.place = written.get(error.place.removeprefix("--set "), error.place)
    return error
