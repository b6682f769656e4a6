"""A person's file and the job it says, so that a change of the job can be shown as a diff of the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ullage.engines.changes import Change, changed
from ullage.formats.check import mended
from ullage.formats.convert import read_file
from ullage.formats.edit import diff, edited, edits_between
from ullage.formats.reading import Finding, Reading
from ullage.formats.registry import format_named
from ullage.formats.tree import dotted
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.job.text import read_text


@frozen
class Theirs:
    """contradicted: what the file says and no job can have; the job is without it. miscounted: the same of how many GPUs and sequences,
    which a launch's own arguments overrule: another launch is told of, not another run."""

    path: Path
    reading: Reading
    job: Job
    overrides: tuple[str, ...]
    contradicted: tuple[Finding, ...] = ()
    miscounted: tuple[Finding, ...] = ()

    def diff(self, change: Change) -> str | None:
        """A unified diff of the file after which it says the change; None where all of it is not the file's to say."""
        given = {override.partition("=")[0] for override in self.overrides}
        if any(key in given or key.partition(".")[0] in given for key in change):
            return None
        after = changed(self.job, change)
        module = format_named(self.reading.format)
        edits = None if after is None else edits_between(module, self.reading, self.job, after)
        if not edits:
            return None
        text = read_text(self.path)
        return diff(text, edited(module, self.reading, text, edits), self.path.name)


def theirs_of(path: str | Path, overrides: Sequence[str] = ()) -> Theirs:
    """The file at ``path``, each ``KEY=VALUE`` of ``overrides`` set on top; what it contradicts is left out, as ``check`` does."""
    reading = read_file(path, None)
    job, found = mended(reading, overrides)
    wrong = [one for one in (*reading.findings, *found) if one.severity == "error"]
    counts = _counts(reading)
    return Theirs(
        path=Path(path),
        reading=reading,
        job=job,
        overrides=tuple(overrides),
        contradicted=tuple(one for one in wrong if one.key not in counts),
        miscounted=tuple(one for one in wrong if one.key in counts),
    )


def _counts(reading: Reading) -> frozenset[str]:
    """Their keys of degrees and of batch sizes."""
    batch = reading.batch
    degrees = [path for key, path in reading.origins.items() if key.startswith("layout.")]
    sizes = [one[1] for one in (batch.whole, batch.micro, batch.accum) if one is not None]
    return frozenset(map(dotted, (*degrees, *sizes)))
