"""The verbs. A command line, a web page and a notebook call these and nothing below.

All sizes are bytes, all times seconds. Every function raises UllageError (errors.py draws the tree) and nothing else for
what a person gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ullage.engines.estimate import Estimate, estimate
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.job.read import read_job

if TYPE_CHECKING:
    from ullage.formats.check import Check
    from ullage.formats.convert import Conversion
    from ullage.hardware.cluster import Device
    from ullage.model.facts import ModelFacts
    from ullage.planner.plan import Answer as Planned
    from ullage.postmortem.why import Why
    from ullage.techniques.told import Shown
    from ullage.train.answers import Measured, Proof, Step, Trained
    from ullage.train.settings import Settings, Training
    from ullage.validation.compare import Validation
    from ullage.watching.watch import Module, Optimizer, Watch

__all__ = [
    "Check",
    "Conversion",
    "Estimate",
    "Job",
    "Measured",
    "ModelFacts",
    "Planned",
    "Proof",
    "Settings",
    "Shown",
    "Step",
    "Trained",
    "Training",
    "Validation",
    "Why",
    "as_dict",
    "bench",
    "check",
    "convert",
    "devices",
    "estimate",
    "measure",
    "models",
    "plan",
    "prove",
    "read_job",
    "show",
    "train",
    "validate",
    "watch",
    "why",
]


def models() -> tuple[ModelFacts, ...]:
    """Every model of the catalogue by name: what ``model:`` of a job file may say without a path.

    Source: the config.json files in model/data/models, each with the address and revision that it was read from.
    """
    from ullage.model import catalogue
    from ullage.model.facts import facts

    return tuple(map(facts, catalogue.names()))


def devices() -> tuple[tuple[Device, tuple[str, ...]], ...]:
    """Every device of the catalogue by name, each with its aliases (an ambiguous alias stands with each of its devices).

    ``capacity_bytes`` is what the driver reports as the card's memory, ``flops_per_s`` dense peaks by element type.
    Source: hardware/data/devices, where every number has its own. Where `ullage bench` has measured this machine, it stands last.
    """
    from ullage.hardware import catalogue, machine

    spellings = catalogue.aliases()
    here = machine.here()
    found = tuple(
        (
            catalogue.device(name),
            tuple(sorted(alias for alias, meant in spellings.items() if name in meant)),
        )
        for name in catalogue.devices()
    )
    return found if here is None else (*found, (here, ()))


def validate(paths: Sequence[str | Path], progress: Callable[[int, int], None] | None = None) -> Validation:
    """Estimates every record of ``paths`` (files, or folders of .json files) and holds it against what was measured.

    progress: called with the number of records done and of all. The record's format is in docs/job.md. A record whose job is
    not modelled or not valid is in ``unsupported`` with its reason; a file that holds no list of records is InvalidInput.
    """
    from ullage.validation.compare import compare
    from ullage.validation.records import read_records

    return compare(read_records(paths), progress)


def convert(path: str | Path, to: str, overrides: Sequence[str] = (), *, name: str | None = None) -> Conversion:
    """The file at ``path`` in the format ``to``, each ``KEY=VALUE`` of ``overrides`` set; docs/formats.md lists the formats.

    name: the file's own format; None: found by its content. What of the job the text does not say is in ``unsaid``, what of the
    file no job holds in ``leftovers``.
    """
    from ullage.formats.convert import convert

    return convert(path, to, overrides, name=name)


def check(path: str | Path, overrides: Sequence[str] = (), *, name: str | None = None) -> Check:
    """A configuration file estimated, with what is wrong or wasteful in it and the smallest edit that helps, as a diff of it.

    overrides: ``KEY=VALUE`` of a job, for what the file does not say: the model and the cluster at least.
    """
    from ullage.formats.check import check

    return check(path, overrides, name=name)


def show(technique: str, job: Job, *, stage: int | None = None) -> Shown:
    """The steps of a technique on a job, with the numbers of the estimate and of the time; docs/show.md lists the techniques.

    stage: the pipeline stage whose rank is told of; None: that of the estimate's peak. InvalidInput where the job does not use it.
    """
    from ullage.techniques.registry import show

    return show(technique, job, stage=stage)


def plan(
    source: str | Path | Mapping[str, object],
    overrides: Sequence[str] = (),
    *,
    goal: str = "fastest",
    engines: Sequence[str] = (),
    top: int = 3,
    exhaustive: bool = False,
    tight: bool = False,
) -> Planned:
    """The best strategies of a job whose missing keys are free; ``plans`` is empty where nothing fits.

    goal: fastest, cheapest, fewest-gpus, longest-sequence, largest-batch or simplest.
    engines: those to search; none: the job's own, else all.
    tight: strategies that may not fit are plans too: whose interval straddles the capacity.
    """
    from ullage.planner.plan import plan

    return plan(source, overrides, goal_name=goal, engines=engines, top=top, exhaustive=exhaustive, tight=tight)


def why(
    given: str,
    job: Job | None = None,
    *,
    against: str | None = None,
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    progress: Callable[[int, int | None], None] | None = None,
) -> Why:
    """What ran out of memory and why: the causes that a message, a log or a snapshot speaks for, and what helps.

    given: a message, the path of a file (gzip too) or of a folder of logs, or "-" for standard input. against: the path of an earlier
    snapshot, where ``given`` is one: ``answer.difference`` says what is held more. config: a person's own file in place of ``job``, with
    ``overrides`` for what it does not say; advice is then shown as a diff of it too.
    progress: called with the bytes read, and of how many.
    """
    from ullage.postmortem.source import read_input
    from ullage.postmortem.why import advised, why

    theirs = None
    contradicted: tuple[str, ...] = ()
    miscounted: tuple[str, ...] = ()
    if config is not None:
        from ullage.formats.theirs import theirs_of

        theirs = theirs_of(config, overrides)
        job = theirs.job
        contradicted = tuple(f"{one.key} = {one.what}; {one.remedy}" for one in theirs.contradicted)
        miscounted = tuple(f"{one.key} = {one.what}: what follows is without it" for one in theirs.miscounted)
    earlier = read_input(against) if against is not None else None
    answer = why(read_input(given, progress), job, earlier, contradicted, miscounted)
    return advised(answer, theirs.diff if theirs is not None else None)


def prove(job: Job, settings: Settings | None = None) -> Proof | None:
    """The job run on its ranks and on one device, from the same seed on the same tokens; ``equal`` says whether they agree.

    Starts a process for each rank, or runs as the rank that a launcher has started: then None on all but the first. Needs ullage[train];
    raises Unsupported for what is not run (docs/train.md).
    """
    from ullage.train.run import prove
    from ullage.train.settings import Settings

    return prove(job, settings or Settings())


def measure(job: Job, settings: Settings | None = None) -> Measured | None:
    """A few steps of the job on its ranks, and what each held at its highest, against the estimate; ``within`` says whether they agree.

    Started as ``prove`` is. settings.steps: timed steps, after two that are recorded. Needs ullage[train].
    """
    from ullage.train.run import measure
    from ullage.train.settings import Settings

    return measure(job, settings or Settings(steps=3))


def bench(
    out: str | Path | None = None, *, device: str | None = None, processes: str | None = None, quick: bool = False
) -> Path:
    """Measures this machine into a calibration file, and says where it is; docs/calibration.md has its format.

    out: None: ~/.config/ullage/this-machine.toml, which a job's ``cluster: 2xthis-machine`` means. device: cpu or cuda; None: cuda where
    torch sees a GPU. processes: how many at once, each measured, as "1,2"; None: 1 and 2 on the CPU, 1 and all GPUs on cuda. Needs torch.
    """
    from ullage.train.calibrated import bench

    return bench(None if out is None else Path(out), device=device, processes=processes, quick=quick)


def watch(
    job: Job | str | Path | Mapping[str, object],
    model: Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> Watch:
    """``with ullage.watch(job):`` around any training loop: what it holds beside what the job's account says; an exception that tells of
    memory gets a note of what ran out, why, and what helps.

    On a GPU the allocator's counters are read, whose peaks are reset at the start. On the CPU every storage of ``model`` and ``optimizer``
    and of the steps is followed, which makes them several times slower: two steps are enough, since the last whole one counts; without a
    model nothing is measured. say: called with the text at the end; None: standard error. Needs torch.
    """
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise Unsupported("is not installed", key="torch", remedy="pip install 'ullage[torch]'")
    from ullage.watching.watch import Watch

    return Watch(job, model, optimizer, say=say)


def train(job: Job, training: Training, tell: Callable[[Step], None] | None = None) -> Trained | None:
    """The job over its data, with checkpoints, metrics and the trained model under training.out; goes on from what is there.

    Started as ``prove`` is. tell: called on rank 0, in its process, after each step; a function of a module. Raises Infeasible where the
    job does not fit its cluster, OutOfMemory where a GPU ran out. Import it from ``ullage.api``: ``ullage.train`` is the package.
    """
    from ullage.train.run import train

    return train(job, training, tell)


def as_dict(answer: Estimate | Measured | Planned | Proof | Shown | Trained | Validation | Why) -> dict[str, object]:
    """The JSON object of docs/job.md, docs/show.md and docs/train.md, in plain Python values: what the commands print as JSON."""
    from ullage.report import json

    if isinstance(answer, Estimate):
        return json.estimate(answer)
    from ullage.planner.plan import Answer
    from ullage.postmortem.why import Why
    from ullage.techniques.told import Shown
    from ullage.train.answers import Measured, Proof, Trained

    if isinstance(answer, Why):
        from ullage.report import why_json

        return why_json.why(answer)
    if isinstance(answer, Proof):
        return json.proof(answer)
    if isinstance(answer, Measured):
        return json.measured(answer)
    if isinstance(answer, Trained):
        return json.trained(answer)
    if isinstance(answer, Answer):
        return json.planned(answer)
    return json.shown(answer) if isinstance(answer, Shown) else json.validation(answer)


def __getattr__(name: str) -> object:
    """Types that only one verb needs load with it."""
    if name == "Validation":
        from ullage.validation.compare import Validation

        return Validation
    if name == "Check":
        from ullage.formats.check import Check

        return Check
    if name == "Conversion":
        from ullage.formats.convert import Conversion

        return Conversion
    if name == "Shown":
        from ullage.techniques.told import Shown

        return Shown
    if name == "Planned":
        from ullage.planner.plan import Answer

        return Answer
    if name == "Why":
        from ullage.postmortem.why import Why

        return Why
    if name in ("Measured", "Proof", "Step", "Trained"):
        from ullage.train import answers

        return getattr(answers, name)
    if name in ("Settings", "Training"):
        from ullage.train import settings

        return getattr(settings, name)
    if name == "ModelFacts":
        from ullage.model.facts import ModelFacts

        return ModelFacts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
