"""A checkpoint's folder: under a name that says that it is whole once it is, with a checksum of each file."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ullage.errors import InvalidInput
from ullage.train.pieces import Piece
from ullage.train.settings import Training
from ullage.units import MIB

ABOUT = "run.json"
_NAME = re.compile(r"step-(\d+)")
_CHUNK = 4 * MIB


def complete(out: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run's folder, by step."""
    named = ((_NAME.fullmatch(path.name), path) for path in out.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in named if match is not None)


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """The folder as this process's own, without what a killed run left half-written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        reason = "it is a file" if out.is_file() else error.strerror
        raise InvalidInput(
            f"cannot be written: {reason}", key="--out", value=str(out), remedy="name a folder"
        ) from None
    try:
        if not _locked(lock):
            raise InvalidInput("is being written by another run", key="--out", value=str(out))
        for path in (*out.glob("*.part"), *out.glob("tokens/*.part")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        yield
    finally:
        os.close(lock)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def resumed_from(training: Training) -> Path | None:
    """The checkpoint to go on from; None: the run begins. What is later than a checkpoint that was named is set aside."""
    there = complete(training.out)
    if training.resume == "auto":
        return there[-1][1] if there else None
    if training.resume == "never":
        if there:
            raise InvalidInput(
                f"holds checkpoints up to {there[-1][1].name}",
                key="--out",
                value=str(training.out),
                remedy="leave --resume never out, or name another folder",
            )
        return None
    folder = Path(training.resume)
    named = _NAME.fullmatch(folder.name)
    if named is None or not (folder / ABOUT).is_file():
        raise InvalidInput(
            "is no checkpoint", key="--resume", value=str(folder), allowed=f"auto, never or a step-N with its {ABOUT}"
        )
    for number, path in there:
        if number > int(named[1]):
            path.rename(next(one for one in _abandoned(path) if not one.exists()))
    return folder


def _abandoned(path: Path) -> Iterator[Path]:
    return (path.with_suffix(f".abandoned-{number}") for number in count(1))


class Writer(FileSystemWriter):
    """DCP's files with a checksum each, under a name that says that they are whole once they are."""

    def __init__(self, whole: Path, about: dict[str, object], keep: int) -> None:
        self.whole, self.part = whole, whole.with_suffix(".part")
        self.about, self.keep = about, keep
        super().__init__(self.part)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy in host memory; of pieces too, which DCP's own copier does not know."""
        pieces = {name: value.copied() for name, value in state_dict.items() if isinstance(value, Piece)}
        rest = {name: value for name, value in state_dict.items() if name not in pieces}
        return {**super().stage(rest), **pieces}

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        names = {one.storage_data.relative_path for one in future.value()}
        sums = {name: checksum(self.part / name) for name in sorted(names)}
        (self.part / f"{plan.storage_data.prefix}sums").write_text(json.dumps(sums))
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        """On the first rank, when all have written."""
        super().finish(metadata, results)
        sums = [*self.part.glob("*sums")]
        if len(sums) != len(results):
            raise OSError(f"{len(sums)} of {len(results)} ranks' files are in it: all nodes must share --out")
        files = {".metadata": checksum(self.part / ".metadata")}
        for path in sums:
            files |= json.loads(path.read_text())
            path.unlink()
        with (self.part / ABOUT).open("w") as file:
            json.dump({**self.about, "files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.part)
        self.part.rename(self.whole)
        _sync(self.whole.parent)
        for _, old in complete(self.whole.parent)[: -self.keep]:
            shutil.rmtree(old.rename(old.with_suffix(".part")), ignore_errors=True)


def wrong_one(folder: Path, names: list[str], sums: Mapping[str, str]) -> str | None:
    for name in names:
        try:
            if checksum(folder / name) != sums[name]:
                return f"{name} is corrupt, its checksum is not the one that was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def checksum(path: Path) -> str:
    """CRC-32: torch's reader checks none of its own."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return f"{found:08x}"


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def reason_of(error: BaseException) -> str:
    """The first rank's error, in a line."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items())
        return f"{reason_of(error)} (rank {rank})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__
