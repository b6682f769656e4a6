"""The verbs on a job's ranks, whoever starts them. torch is loaded when one is called."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.train.reach import refuse_what_is_not_run
from ullage.train.settings import Settings

if TYPE_CHECKING:
    from ullage.train.answers import Measured, Proof


def prove(job: Job, settings: Settings) -> Proof | None:
    """The job's ranks against one device (proof.py). None on a rank that a launcher has started and that is not the first."""
    found: Proof | None = _on_ranks("ullage.train.proof", "prove", job, settings)
    return found


def measure(job: Job, settings: Settings) -> Measured | None:
    """A few steps of the job, held against its estimate (measured.py). None on a rank that is not the first."""
    from ullage.engines.estimate import estimate

    estimate(job)  # says before anything is started what it does not model
    found: Measured | None = _on_ranks("ullage.train.measured", "measure", job, settings)
    return found


def _on_ranks(module: str, function: str, job: Job, *rest: object) -> Any:
    extras = {"torch": "train", "transformers": "train"}
    if job.engine.name == "deepspeed":
        extras["deepspeed"] = "deepspeed"
    if job.lora is not None:
        extras["peft"] = "train"
    for needed, extra in extras.items():
        if find_spec(needed) is None:
            raise Unsupported("is not installed", key=needed, remedy=f"pip install 'ullage[{extra}]'")
    refuse_what_is_not_run(job)
    from importlib import import_module

    from ullage.train.ranks import on_ranks

    return on_ranks(getattr(import_module(module), function), (job, *rest), job.layout.world)
