"""The formats by name, and which of them a file is written in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from ullage.errors import InvalidInput, UnknownName
from ullage.formats.foreign import foreign, remedy
from ullage.formats.reading import Reading
from ullage.formats.tree import Leaves, Path, Syntax
from ullage.job.fields import hint
from ullage.job.job import Job


class Format(Protocol):
    """What each format's module offers. ENGINES: those that it can start, the first for a job of another engine.

    CANNOT: job keys that it has no words for, each with what decides instead.
    """

    NAME: str
    TITLE: str
    ENGINES: tuple[str, ...]
    SYNTAX: Syntax
    CANNOT: Mapping[str, str]

    def detect(self, text: str, name: str) -> bool: ...

    def read(self, text: str, place: str) -> Reading: ...

    def leaves(self, job: Job) -> dict[Path, object]: ...

    def notes(self, job: Job) -> tuple[str, ...]: ...

    def write(self, found: Leaves, comments: tuple[str, ...]) -> str: ...


READ = (
    "job_file",
    "deepspeed",
    "accelerate",
    "megatron",
    "torchtitan",
    "axolotl",
    "llamafactory",
    "training_arguments",
)
"""In the order in which a file is tried: the surest marks first."""

LAUNCHERS = ("torchrun", "slurm", "kubernetes")
"""Written alone: what starts a job, whatever its engine."""

WRITTEN = {"job": "job_file", **{name.replace("_", "-"): name for name in READ[1:]}}


class Launcher(Protocol):
    """What the module of a launch line offers."""

    TITLE: str

    def write(self, job: Job, comments: tuple[str, ...]) -> str: ...


def launcher_named(name: str) -> Launcher:
    return cast(Launcher, import_module(f"ullage.formats.{name}"))


def format_named(name: str) -> Format:
    """The format that ``--to`` or ``--from`` names. UnknownName lists the known ones."""
    if name not in WRITTEN:
        allowed = ", ".join((*WRITTEN, *LAUNCHERS))
        raise UnknownName(
            "is no format", key="format", value=name, allowed=allowed, remedy=hint(name, (*WRITTEN, *LAUNCHERS))
        )
    return _module(WRITTEN[name])


def format_of(text: str, place: str) -> Format:
    """The format of a text, by what stands in it. InvalidInput where it is none of them."""
    if not text.strip():
        raise InvalidInput("is empty", allowed=_allowed(), place=place)
    found = foreign(text)
    for name in READ:
        module = _module(name)
        if module.detect(text, place) and (found is None or name == "job_file" or found.reader == module.NAME):
            return module
    if found is not None:
        what = f"is {found.title}, which is not read"
        raise InvalidInput(what, allowed=_allowed(), remedy=remedy(found.title), place=place)
    raise InvalidInput(
        "is none of the formats that are read", allowed=_allowed(), remedy="name it: --from deepspeed", place=place
    )


def _module(name: str) -> Format:
    return cast(Format, import_module(f"ullage.formats.{name}"))


def _allowed() -> str:
    return ", ".join(_module(name).TITLE for name in READ)
