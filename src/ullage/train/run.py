"""The verbs on a job's ranks, whoever starts them. torch is loaded when one is called."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ullage.errors import Infeasible, Unsupported
from ullage.job.job import Job
from ullage.train.places import place
from ullage.train.reach import refuse_what_is_not_run
from ullage.train.replan import with_budget
from ullage.train.settings import Settings, Training

if TYPE_CHECKING:
    from collections.abc import Callable

    from ullage.engines.estimate import Estimate
    from ullage.train.answers import Measured, Proof, Step, Trained


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


def train(job: Job, training: Training, tell: Callable[[Step], None] | None = None) -> Trained | None:
    """The job over its data (loop.py). None on a rank that a launcher has started and that is not the first."""
    refuse(job)
    job = with_budget(job, training.memory_budget)
    expected = fit(job)
    if expected is not None and expected.verdict == "oom" and not training.force:
        raise Infeasible(
            "does not fit, even by the low estimate",
            key="job",
            value=_against(expected),
            remedy="ullage plan finds what fits; --force starts it all the same",
        )
    if place() is None:  # before there are ranks that wait for it
        from ullage.train.documents import prepare

        prepare(job, training)
    predicted = expected.peak.allocated_bytes if expected is not None else None
    found: Trained | None = _on_ranks("ullage.train.loop", "train", job, training, tell, predicted)
    return found


def _against(expected: Estimate) -> str:
    if expected.is_over_host:
        return f"{expected.host_bytes:,} of {expected.job.cluster.host_memory_bytes:,} bytes of a node"
    return f"{expected.peak.low_bytes:,} of {expected.capacity_bytes:,} bytes a GPU"


def fit(job: Job) -> Estimate | None:
    """The job's estimate; None where it has none."""
    from ullage.engines.estimate import estimate

    try:
        return estimate(job)
    except Unsupported:
        return None


def on_gpus() -> bool:
    """Whether ranks run on GPUs here."""
    if find_spec("torch") is None:
        return False
    from ullage.train.ranks import device_of

    return device_of(0).type == "cuda"


def refuse(job: Job) -> None:
    """Raises Unsupported for what is not carried out here, or needs what is not installed."""
    extras = {"torch": "train", "transformers": "train"}
    if job.engine.name == "deepspeed":
        extras["deepspeed"] = "deepspeed"
    if job.lora is not None:
        extras["peft"] = "train"
    for needed, extra in extras.items():
        if find_spec(needed) is None:
            raise Unsupported("is not installed", key=needed, remedy=f"pip install 'ullage[{extra}]'")
    refuse_what_is_not_run(job)


def _on_ranks(module: str, function: str, job: Job, *rest: object) -> Any:
    refuse(job)
    from importlib import import_module

    from ullage.train.ranks import on_ranks

    return on_ranks(getattr(import_module(module), function), (job, *rest), job.layout.world)
