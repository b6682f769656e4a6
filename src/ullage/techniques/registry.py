"""Techniques by name; each is loaded when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from ullage.errors import UnknownName, nearest
from ullage.job.job import Job
from ullage.techniques.told import Shown

TECHNIQUES = {
    "zero": "who owns which states, what is gathered and reduced when",
    "tensor-parallel": "which matrices are cut, what is exchanged around them",
    "pipeline": "stages, sends, micro-batches in flight, the bubble, a Gantt chart",
    "checkpointing": "what a layer keeps, what runs again, what that costs",
    "mixed-precision": "every copy of a parameter, every cast",
    "collectives": "everything that a rank sends in a step, with its seconds",
}


def known(technique: str) -> str:
    """The name, if it is one; UnknownName else."""
    if technique not in TECHNIQUES:
        meant = nearest(technique, TECHNIQUES)
        raise UnknownName(
            "is no technique",
            key="TECHNIQUE",
            value=technique[:60],
            allowed=", ".join(TECHNIQUES),
            remedy=f"did you mean {meant}?" if meant else None,
        )
    return technique


def show(technique: str, job: Job, *, stage: int | None = None) -> Shown:
    """The technique's steps on a job, told of a rank of ``stage`` (None: the stage of the estimate's peak).

    Raises UnknownName for a technique that there is none of, InvalidInput where the job does not use it.
    """
    module = import_module(f"ullage.techniques.{known(technique).replace('-', '_')}")
    found: Shown = module.told(job, stage)
    return replace(found, notes=(*found.notes, *job.warnings))
