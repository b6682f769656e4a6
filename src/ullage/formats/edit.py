"""The smallest edit of a person's file that makes a job another: leaves set or dropped, everything else as they wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import unified_diff

from ullage.formats.reading import Reading
from ullage.formats.registry import Format
from ullage.formats.tree import Path
from ullage.job.job import Job

Edits = Mapping[Path, object]
"""Path -> value to set; None: to drop."""


def edits_between(module: Format, reading: Reading, before: Job, after: Job) -> dict[Path, object] | None:
    """What to change in their file so that it says ``after``. None where that is not theirs to say.

    A leaf that says ``auto`` or a variable is decided elsewhere: an edit of it would contradict what decides.
    """
    old, new = module.leaves(before), module.leaves(after)
    old, new = _as_written(old, reading), _as_written(new, reading)
    found: dict[Path, object] = {path: value for path, value in new.items() if old.get(path) != value}
    found |= {path: None for path in old if path not in new and path in reading.tree.leaves}
    found = {path: value for path, value in found.items() if not _derived(path, reading)}
    decided_elsewhere = any(
        _elsewhere(reading.tree.leaves.get(path)) or in_another_file(path, reading) for path in found
    )
    return None if decided_elsewhere or not found else found


def in_another_file(path: Path, reading: Reading) -> bool:
    """Where a section should be stands one value: the name of the file that holds it."""
    return any(isinstance(reading.tree.leaves.get(path[:length]), str) for length in range(1, len(path)))


def _as_written(leaves: dict[Path, object], reading: Reading) -> dict[Path, object]:
    return {reading.renamed.get(path, path): value for path, value in leaves.items()}


def _derived(path: Path, reading: Reading) -> bool:
    """A number that follows from the others need not be written where it was not."""
    whole = reading.batch.whole
    return path not in reading.tree.leaves and whole is None and path[-1] in ("train_batch_size", "global_batch_size")


def _elsewhere(value: object) -> bool:
    return isinstance(value, str) and (value == "auto" or "$" in value)


def edited(module: Format, reading: Reading, text: str, edits: Edits) -> str:
    """Their text with the edits made, but for what stands in another file; a section whose last leaf goes goes with it."""
    edits = {path: value for path, value in edits.items() if not in_another_file(path, reading)}
    gone = {path for path, value in edits.items() if value is None}
    for path, value in edits.items():
        if value is not None:
            text = module.SYNTAX.put(text, path, value)
    for path in dict.fromkeys(_whole_section(path, gone, reading) for path in edits if path in gone):
        text = module.SYNTAX.drop(text, path)
    return text


def _whole_section(path: Path, gone: set[Path], reading: Reading) -> Path:
    """The highest section of ``path`` of which nothing stays."""
    for length in range(1, len(path)):
        if all(leaf in gone for leaf in reading.tree.leaves if leaf[:length] == path[:length]):
            return path[:length]
    return path


def diff(before: str, after: str, name: str) -> str | None:
    """A unified diff; None where nothing changed."""
    lines = unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}", n=2)
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return text or None


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
