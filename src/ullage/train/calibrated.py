"""`ullage bench`: the machine measured beside as many processes as a job has, and the calibration file that comes of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ullage.errors import InvalidInput, Unsupported
from ullage.hardware.machine import read, usual_place
from ullage.train.places import place


def bench(out: Path | None, *, device: str | None, processes: str | None, quick: bool) -> Path:
    """The file that was written. Raises InvalidInput for a place that cannot be written, before anything is measured."""
    if find_spec("torch") is None:
        raise Unsupported("is not installed", key="torch", remedy="pip install 'ullage[train]'")
    if place() is not None:
        raise Unsupported("starts processes of its own, and these are a launcher's", key="ullage bench")
    from ullage.bench.machine import choose, facts, numbers
    from ullage.bench.measure import measured
    from ullage.bench.written import text
    from ullage.train.ranks import on_ranks

    kind = choose(device)
    counts = numbers(processes, kind)
    path = writable(_usual() if out is None else out)
    runs = [on_ranks(measured, (kind, quick), count) for count in counts]
    _save(path, text(facts(kind), runs))
    read(path)  # what was written is what is read
    return path


def _usual() -> Path:
    path = usual_place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def writable(path: Path) -> Path:
    """The path, which can be written: told before what takes long, not after it."""
    try:
        there = path.exists()
        path.open("a", encoding="utf-8").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def _save(path: Path, written: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(written, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(
        f"cannot be written: {error.strerror}",
        key="--out",
        value=str(path),
        remedy="name a file in a folder that is there",
    )
