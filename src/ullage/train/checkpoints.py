"""What a killed run goes on from: torch.distributed.checkpoint, written beside the training, and whole or not at all.

OUT/step-N holds a file of tensors for each rank, DCP's .metadata, and run.json with the position, the loss scaler, the job and a checksum
of each file. It is written as step-N.part and renamed when every rank has written, so that every step-N is whole. Tensors carry the
names that they have on one device, whatever the layout, so that another layout reads them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ullage.errors import InvalidInput, UllageError
from ullage.frozen import frozen
from ullage.job.write import job_to_dict
from ullage.train.composed import Run
from ullage.train.settings import Training
from ullage.units import MIB

ABOUT = "run.json"
_NAME = re.compile(r"step-(\d+)")
_CHUNK = 4 * MIB


@frozen
class Position:
    """step: optimizer steps done. updates: those of them that fp16's scaler did not skip, which the learning rate's schedule counts."""

    step: int = 0
    updates: int = 0


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
        raise InvalidInput(f"cannot be written: {error.strerror}", key="--out", value=str(out)) from None
    try:
        if not _locked(lock):
            raise InvalidInput("is being written by another run", key="--out", value=str(out))
        for path in out.glob("*.part"):
            shutil.rmtree(path, ignore_errors=True)
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
    if not (folder / ABOUT).is_file():
        raise InvalidInput(
            f"is no checkpoint: it has no {ABOUT}", key="--resume", value=str(folder), allowed="auto, never or a step-N"
        )
    step = json.loads((folder / ABOUT).read_text())["step"]
    for number, path in there:
        if number > step:
            path.rename(path.with_suffix(".abandoned"))
    return folder


class Checkpoints:
    """Of one run, on this rank. same: what a checkpoint must have been made with to be gone on from, by name.

    group: ranks that talk on the CPU beside the training; None where there is one rank.
    """

    def __init__(self, run: Run, training: Training, same: Mapping[str, object], group: Any) -> None:
        self.run, self.training, self.same, self.group = run, training, same, group
        self.saved: int | None = None
        self._pending: Future[Any] | None = None
        self._rank = distributed.get_rank() if group is not None else 0

    def save(self, position: Position) -> None:
        """Copies the run to host memory, and writes it while the training goes on; waits for the one before."""
        if self.saved == position.step:
            return
        self.wait()
        scaler = self.run.scaler
        about = {
            "step": position.step,
            "updates": position.updates,
            "same": dict(self.same),
            "scaler": None if scaler is None else scaler.state_dict(),
            "job": job_to_dict(self.run.job),
        }
        writer = _Writer(self.training.out / f"step-{position.step}", about, self.training.keep)
        state = {**_model(self.run), **_optimizer(self.run), **_random(self.run, self._rank)}
        self.saved = position.step
        found = async_save(state, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
        assert isinstance(found, Future)
        self._pending = found

    def check(self) -> None:
        """Raises what the last save met, once it has ended."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until the last save has ended; raises what it met."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        failed = pending.exception()
        if failed is None:
            return
        last = complete(self.training.out)
        raise UllageError(
            f"cannot be written: {_reason(failed)}",
            key="--out",
            value=f"{self.training.out}/step-{self.saved}",
            remedy=f"{last[-1][1].name} is whole, and the same command goes on from it" if last else None,
        )

    def settle(self) -> None:
        """Lets the last save end, however: the training has ended too, and says why itself."""
        if self._pending is not None:
            self._pending.exception()

    def restore(self, folder: Path) -> Position:
        """The run as the checkpoint has it, whatever layout wrote it. Random states come back on the layout that they are of."""
        about = self._read(folder)
        self._refuse_another(about["same"])
        written = _keys(folder)
        state = _model(self.run)
        if any(key.startswith("optimizer.") for key in written):
            state |= _optimizer(self.run, made=True)
        if about["job"]["layout"] == job_to_dict(self.run.job)["layout"]:
            state |= {key: value for key, value in _random(self.run, self._rank).items() if key in written}
        try:
            load(
                state,
                storage_reader=FileSystemReader(folder),
                process_group=self.group,
                no_dist=self.group is None,
            )
        except (CheckpointException, Exception) as error:  # the former is no Exception
            raise self._broken(folder, _reason(error)) from None
        _set_random(state, self._rank)
        if self.run.scaler is not None and about["scaler"] is not None:
            self.run.scaler.load_state_dict(about["scaler"])
        self.saved = about["step"] if folder.parent.resolve() == self.training.out.resolve() else None
        return Position(step=about["step"], updates=about["updates"])

    def _read(self, folder: Path) -> dict[str, Any]:
        """run.json, once every file has the checksum that it had when it was written; ranks share the reading."""
        try:
            about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
            names = sorted(about["files"])
        except (OSError, ValueError, KeyError) as error:
            raise self._broken(folder, f"{ABOUT}: {error}") from None
        ranks = distributed.get_world_size() if self.group is not None else 1
        wrong: list[str | None] = [_wrong(folder, names[self._rank :: ranks], about["files"])]
        if self.group is not None:
            mine, wrong = wrong[0], [None] * ranks
            distributed.all_gather_object(wrong, mine, group=self.group)
        for one in wrong:
            if one is not None:
                raise self._broken(folder, one)
        return about

    def _refuse_another(self, was: Mapping[str, object]) -> None:
        for name, value in json.loads(json.dumps(self.same)).items():
            if was.get(name) != value:
                raise InvalidInput(
                    f"holds a run of another {name}: {str(was.get(name))[:60]}, here {str(value)[:60]}",
                    key="--out",
                    value=str(self.training.out),
                    remedy="name another folder",
                )

    def _broken(self, folder: Path, why: str) -> InvalidInput:
        older = [path for _, path in complete(folder.parent) if path != folder]
        return InvalidInput(
            f"cannot be gone on from: {why}",
            key="checkpoint",
            value=str(folder),
            remedy=f"--resume {older[-1]} goes on from the one before" if older else "begin anew in another --out",
        )


class _Writer(FileSystemWriter):
    """DCP's files with a checksum each, under a name that says that they are whole once they are."""

    def __init__(self, whole: Path, about: dict[str, object], keep: int) -> None:
        self.whole, self.part = whole, whole.with_suffix(".part")
        self.about, self.keep = about, keep
        super().__init__(self.part)

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        names = {one.storage_data.relative_path for one in future.value()}
        sums = {name: _checksum(self.part / name) for name in sorted(names)}
        (self.part / f"{plan.storage_data.prefix}sums").write_text(json.dumps(sums))
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        """On the first rank, when all have written."""
        super().finish(metadata, results)
        files = {".metadata": _checksum(self.part / ".metadata")}
        for path in self.part.glob("*sums"):
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


# -- the state of a run, by the names that its tensors have on one device


def _model(run: Run) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in get_model_state_dict(run.model).items()}


def _optimizer(run: Run, *, made: bool = False) -> dict[str, Any]:
    """Of the parameters that this rank steps: ZeRO-1's owners each have their own. made: as zeros where there are none yet."""
    optimizer: Any = getattr(run.optimizer, "optim", run.optimizer)
    if not optimizer.state and not made:
        return {}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    found: dict[str, Any] = get_optimizer_state_dict(run.model, optimizer, options=options)
    return {f"optimizer.{key}": value for key, value in found.items() if isinstance(value, torch.Tensor)}


def _random(run: Run, rank: int) -> dict[str, torch.Tensor]:
    found = {f"random.{rank}.cpu": torch.get_rng_state()}
    if run.device.type == "cuda":
        found[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(run.device)
    return found


def _set_random(state: Mapping[str, Any], rank: int) -> None:
    setters: dict[str, Callable[[torch.Tensor], None]] = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for device, setter in setters.items():
        if (found := state.get(f"random.{rank}.{device}")) is not None:
            setter(found)


def _keys(folder: Path) -> set[str]:
    return {*FileSystemReader(folder).read_metadata().state_dict_metadata}


# -- files


def _wrong(folder: Path, names: list[str], sums: Mapping[str, str]) -> str | None:
    for name in names:
        try:
            if _checksum(folder / name) != sums[name]:
                return f"{name} is corrupt, its checksum is not the one that was written"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def _checksum(path: Path) -> str:
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


def _reason(error: BaseException) -> str:
    """The first rank's error, in a line."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items())
        return f"{_reason(error)} (rank {rank})"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:200] or type(error).__name__
