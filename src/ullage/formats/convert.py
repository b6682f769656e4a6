"""``convert``: a file of any format, or a job file, written for another; what that one cannot say is told, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath

from ullage.errors import UllageError, Unsupported
from ullage.formats.complete import contradiction, document_of, job_of
from ullage.formats.launch import notes
from ullage.formats.reading import Leftover, Reading
from ullage.formats.registry import LAUNCHERS, Format, format_named, format_of, launcher_named
from ullage.formats.retarget import retargeted
from ullage.formats.tree import Path, flat
from ullage.frozen import frozen
from ullage.job.fields import show
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.job.text import read_text
from ullage.job.write import job_to_dict


@frozen
class Unsaid:
    """A key of the job that the text does not say: ``value`` is the job's, ``why`` what decides instead."""

    key: str
    value: object
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {show(self.value)}: {self.why}"


@frozen
class Conversion:
    """text: the file; unsaid: what of the job it does not say; notes: what its reader must fill in."""

    format: str
    job: Job
    text: str
    unsaid: tuple[Unsaid, ...]
    leftovers: tuple[Leftover, ...]
    notes: tuple[str, ...]


def read_file(path: str | FilePath, name: str | None = None) -> Reading:
    """What a file says. ``name``: its format; None: found by its content. InvalidInput where it is none."""
    text = read_text(FilePath(path), "a configuration file")
    module = format_of(text, str(path)) if name is None else format_named(name)
    if not text.strip():
        return format_of(text, str(path)).read(text, str(path))
    return module.read(text, str(path))


def read_whole(path: str | FilePath, overrides: Sequence[str] = (), name: str | None = None) -> tuple[Reading, Job]:
    """The file and its whole job. Contradiction where the file's own numbers exclude each other."""
    reading = read_file(path, name)
    document, findings = document_of(reading, overrides)
    for finding in (*reading.findings, *findings):
        if finding.severity == "error":
            raise contradiction(reading, finding)
    return reading, job_of(reading, document, overrides)


def convert(path: str | FilePath, to: str, overrides: Sequence[str] = (), *, name: str | None = None) -> Conversion:
    """The file at ``path``, each ``KEY=VALUE`` of ``overrides`` set, in the format ``to``.

    A job of an engine that the format does not start is written as the nearest job of one that it does. Leftovers of the same
    format are written back.
    """
    if to in LAUNCHERS:
        reading, job = read_whole(path, overrides, name)
        return _launch(job, to)
    module = format_named(to)
    reading, job = read_whole(path, overrides, name)
    kept = reading.leftovers if reading.format == module.NAME else ()
    return write_job(job, module, kept, tuple(one for one in reading.leftovers if one not in kept))


def _launch(job: Job, to: str) -> Conversion:
    """What starts the job; the job itself is said by the files that it names."""
    found = notes(job)
    text = launcher_named(to).write(job, found)
    return Conversion(format=to, job=job, text=text, unsaid=(), leftovers=(), notes=found)


def write_job(job: Job, module: Format, kept: Sequence[Leftover] = (), lost: Sequence[Leftover] = ()) -> Conversion:
    """The text of a job; ``kept`` leftovers are written with it."""
    target = job
    if job.engine.name not in module.ENGINES:
        target = _nearest(job, module)
    leaves = module.leaves(target)
    leaves |= {one.path: one.value for one in kept if one.path not in leaves}
    told = unsaid(job, target, module, module.write(leaves, ()))
    comments = tuple(f"not said here: {one}" for one in told if one.key not in ("model", "cluster"))
    to_fill_in = module.notes(target)
    text = module.write(leaves, (*comments, *to_fill_in))
    return Conversion(format=module.NAME, job=target, text=text, unsaid=told, leftovers=tuple(lost), notes=to_fill_in)


def _nearest(job: Job, module: Format) -> Job:
    """The job under the format's first engine that takes it."""
    problem: UllageError | None = None
    for engine in module.ENGINES:
        try:
            return read_job(retargeted(job, engine))
        except UllageError as error:
            problem = problem or error
    raise Unsupported(
        f"no {module.TITLE} says a job of engine {job.engine.name} like this one: {problem}",
        key="--to",
        value=module.NAME,
    ) from problem


def unsaid(job: Job, target: Job, module: Format, text: str) -> tuple[Unsaid, ...]:
    """Every key of ``job`` that the text, read back, does not give: found by reading it, so that none is forgotten."""
    reading = module.read(text, module.TITLE)
    back = _read_back(target, reading)
    wanted, found = flat(job_to_dict(job), ""), flat(job_to_dict(back), "")
    told = [
        Unsaid(key=".".join(path), value=value, why=_why(".".join(path), module, found.get(path)))
        for path, value in wanted.items()
        if value != found.get(path) and not _says_nothing(path, value)
    ]
    return (*_machines(job, module, reading), *(one for one in told if one.key not in _ALWAYS))


def _says_nothing(path: Path, value: object) -> bool:
    """The model is told as a whole, and no options are nothing to tell."""
    return path[0] in ("model", "schema") or (value in ({}, None) and path[0] == "engine")


_ALWAYS = ("model", "cluster", "data.seq_len")


def _machines(job: Job, module: Format, reading: Reading) -> Iterator[Unsaid]:
    """What every run must be told, also where a reader's default happens to be the job's own value."""
    values = {"model": job.model.name, "cluster": _cluster(job), "data.seq_len": job.data.seq_len}
    for key in _ALWAYS:
        if key in module.CANNOT and key not in reading.origins:
            yield Unsaid(key=key, value=values[key], why=module.CANNOT[key])


def _cluster(job: Job) -> str:
    cluster = job.cluster
    return f"{cluster.nodes} x {cluster.gpus_per_node} x {cluster.device.name}"


def _why(key: str, module: Format, found: object) -> str:
    while key:
        if key in module.CANNOT:
            return module.CANNOT[key]
        key = key.rpartition(".")[0]
    return f"{module.TITLE} says {show(found)}"


def _read_back(target: Job, reading: Reading) -> Job:
    """The job that a text alone says, on the same machines and with the same model."""
    given = job_to_dict(target)
    keys = {**reading.keys, "model": given["model"], "cluster": given["cluster"]}
    document, _ = document_of(replace(reading, keys=keys))
    return read_job(document)
