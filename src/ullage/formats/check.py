"""``check``: a file that a person has, estimated: whether it fits, what contradicts what, what it wastes, and the smallest edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path as FilePath

from ullage.engines.changes import Change, answer_to, changed, combined, merged
from ullage.engines.estimate import Estimate, estimate
from ullage.errors import InvalidInput, UllageError
from ullage.formats.complete import document_of, job_of, origin
from ullage.formats.convert import read_file
from ullage.formats.edit import diff, edited, edits_between
from ullage.formats.findings import findings
from ullage.formats.reading import Finding, Leftover, Reading
from ullage.formats.registry import Format, format_named
from ullage.formats.tree import Path, dotted
from ullage.frozen import frozen
from ullage.job.fields import show
from ullage.job.job import Job
from ullage.job.text import read_text

_MOST_MENDED = 16
_MOST_TRIED = 24
"""Changes tried for an edit: each is an estimate."""


@frozen
class Check:
    """edit: a unified diff of their file; helps: what it brings, in words (None: no edit helps)."""

    job: Job
    leftovers: tuple[Leftover, ...]
    estimate: Estimate
    findings: tuple[Finding, ...]
    edit: str | None
    helps: str | None


def check(path: str | FilePath, overrides: Sequence[str] = (), *, name: str | None = None) -> Check:
    """The file at ``path``, each ``KEY=VALUE`` of ``overrides`` set on top of what it says.

    What the file contradicts is a finding, and the check goes on without that key; what the overrides say wrongly is raised.
    """
    reading = read_file(path, name)
    module = format_named(reading.format)
    job, contradicted = mended(reading, overrides)
    answer = estimate(job)
    found = (*contradicted, *findings(reading, job, answer))
    edits = {path: value for finding in found for path, value in finding.fix}
    helps = "corrects what contradicts itself" if edits else None
    text = read_text(FilePath(path))
    better = _Better(module, reading, text, overrides, job, edits)
    if (more := better.of(answer)) is not None:
        edits |= more
        helps = _in_words(more)
    elif answer.verdict != "fits":
        partly, advice = better.elsewhere()
        found = (*found, *advice)
        if partly:
            edits |= partly
            helps = f"{_in_words(partly)}: a part of what makes it fit"
    edit = diff(text, edited(module, reading, text, edits), FilePath(path).name) if edits else None
    return Check(
        job=job,
        leftovers=reading.leftovers,
        estimate=answer,
        findings=found,
        edit=edit,
        helps=helps if edit is not None else None,
    )


def mended(reading: Reading, overrides: Sequence[str]) -> tuple[Job, tuple[Finding, ...]]:
    """The job without the keys of the file that no job can have, each of them a finding."""
    found: list[Finding] = []
    keys = dict(reading.keys)
    while True:
        try:
            document, contradicted = document_of(replace(reading, keys=keys), overrides)
            return job_of(reading, document, overrides), (*found, *contradicted)
        except UllageError as error:
            path = origin(reading, error)
            if path is None or error.key == "model" or len(found) >= _MOST_MENDED:
                raise  # there is no job without a model
            found.append(_as_finding(error, path))
            keys = _without(keys, reading, path)


def _as_finding(error: UllageError, path: Path) -> Finding:
    value = f"{show(error.value)}: " if error.value is not None else ""
    allowed = f"allowed: {error.allowed}" if error.allowed else ""
    remedy = "; ".join(part for part in (error.remedy, allowed) if part) or "take it out"
    fix = () if isinstance(error, InvalidInput) and error.code == "invalid-input" else ((path, None),)
    return Finding(severity="error", key=dotted(path), what=f"{value}{error.what}", remedy=remedy, fix=fix)


def _without(keys: dict[str, object], reading: Reading, path: Path) -> dict[str, object]:
    """The document without every key that this path of the file said."""
    for key in [key for key, said_at in reading.origins.items() if said_at == path]:
        keys = _dropped(keys, tuple(key.split(".")))
    return keys


def _dropped(keys: dict[str, object], parts: tuple[str, ...]) -> dict[str, object]:
    head, *rest = parts
    if head not in keys:
        return keys
    if not rest:
        return {key: value for key, value in keys.items() if key != head}
    inner = keys[head]
    return keys | {head: _dropped(inner, tuple(rest))} if isinstance(inner, dict) else keys


class _Better:
    """The search for the edit that makes the job fit, or, where it fits, takes out what costs time for nothing.

    A change counts only if the edited text, read again, says a job that fits.
    """

    def __init__(
        self, module: Format, reading: Reading, text: str, overrides: Sequence[str], job: Job, edits: dict[Path, object]
    ) -> None:
        self.module = module
        self.reading = reading
        self.text = text
        self.overrides = overrides
        self.job = job
        self.edits = edits

    def of(self, answer: Estimate) -> dict[Path, object] | None:
        changes: Iterator[Change]
        if answer.verdict == "fits":
            changes = (change for change in _wasteful(self.job) if self._theirs(change) is not None)
        else:
            changes = map(merged, combined(self.job, lambda change: self._theirs(change) is not None))
        for change in islice(changes, _MOST_TRIED):
            edits = self._theirs(change)
            if edits is not None and self._fits(edits):
                return edits
        return None

    def _theirs(self, change: Change) -> dict[Path, object] | None:
        """The change in their file; None where it is not the file's to make."""
        if _said_by(self.overrides, change):
            return None
        after = changed(self.job, change)
        return None if after is None else edits_between(self.module, self.reading, self.job, after)

    def _fits(self, edits: dict[Path, object]) -> bool:
        text = edited(self.module, self.reading, self.text, self.edits | edits)
        try:
            job, _ = mended(self.module.read(text, self.reading.place), self.overrides)
            return estimate(job).verdict == "fits"
        except UllageError:
            return False

    def elsewhere(self) -> tuple[dict[Path, object], tuple[Finding, ...]]:
        """The smallest change that fits, where the file alone cannot make it: what of it is the file's, and the whole of it."""
        for some in islice(combined(self.job, lambda _: True), _MOST_TRIED):
            answer = answer_to(self.job, merged(some))
            if answer is None or answer.verdict != "fits":
                continue
            theirs = [self._theirs(change) for change in some]
            said = ", ".join(f"{key} = {show(value)}" for key, value in merged(some).items())
            where = "; ".join(self._where(change, edits) for change, edits in zip(some, theirs, strict=True))
            advice = Finding(severity="advice", key="memory", what=f"fits with {said}", remedy=where)
            return {path: value for edits in theirs for path, value in (edits or {}).items()}, (advice,)
        return {}, ()

    def _where(self, change: Change, edits: dict[Path, object] | None) -> str:
        if edits:
            return f"here {_in_words(edits)}"
        key = next(iter(change))
        return f"{key}: {self.module.CANNOT.get(key, 'the flags, or the arguments of the trainer')}"


def _in_words(edits: dict[Path, object]) -> str:
    said = ", ".join(f"{dotted(path)} = {show(value)}" for path, value in edits.items() if value is not None)
    taken = ", ".join(dotted(path) for path, value in edits.items() if value is None)
    return "; ".join(part for part in (said, f"without {taken}" if taken else "") if part)


def _said_by(overrides: Sequence[str], change: Change) -> bool:
    """A key that a flag sets is not the file's to change."""
    given = {override.partition("=")[0] for override in overrides}
    return any(key in given or key.partition(".")[0] in given for key in change)


def _wasteful(job: Job) -> Iterator[Change]:
    if job.offload.optimizer != "none" or job.offload.params != "none":
        yield {"offload.optimizer": "none", "offload.params": "none"}
        if job.offload.params != "none":
            yield {"offload.params": "none"}
