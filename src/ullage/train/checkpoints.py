"""What a killed run goes on from: torch.distributed.checkpoint, written beside the training, and whole or not at all.

OUT/step-N holds a file of tensors for each rank, DCP's .metadata, and run.json with the position, the loss scaler, the job and a checksum
of each file. It is written as step-N.part and renamed when every rank has written, so that every step-N is whole. Tensors carry the
names that they have on one device, whatever the layout, so that another layout reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from ullage.errors import InvalidInput, UllageError
from ullage.frozen import frozen
from ullage.job.write import job_to_dict
from ullage.train.checkpoint_files import ABOUT, Writer, complete, reason_of, wrong_one
from ullage.train.composed import Run
from ullage.train.settings import Training
from ullage.train.states import MODEL, OPTIMIZER


@frozen
class Position:
    """step: optimizer steps done. updates: those of them that fp16's scaler did not skip, which the learning rate's schedule counts."""

    step: int = 0
    updates: int = 0


class Checkpoints:
    """Of one run, on this rank. same: what a checkpoint must have been made with to be gone on from, by name.

    group: ranks that talk on the CPU beside the training; None where there is one rank.
    """

    def __init__(self, run: Run, training: Training, same: Mapping[str, object], group: Any) -> None:
        self.run, self.training, self.same, self.group = run, training, same, group
        self.saved: int | None = None
        self._pending: Future[Any] | None = None
        self._rank = distributed.get_rank() if group is not None else 0
        self._from: Path | None = None

    @property
    def last(self) -> Path:
        """The checkpoint that has the run as it is, once a save has ended: the last one, or the one that it went on from."""
        if self.saved is not None:
            return self.training.out / f"step-{self.saved}"
        assert self._from is not None, "nothing has been saved"
        return self._from

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
        writer = Writer(self.training.out / f"step-{position.step}", about, self.training.keep)
        state = {**self.run.states(), **_random(self.run, self._rank)}
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
            f"cannot be written: {reason_of(failed)}",
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
        state = self.run.states(made=any(key.startswith(OPTIMIZER) for key in written))
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
            raise self._broken(folder, reason_of(error)) from None
        self.run.restored()
        _set_random(state, self._rank)
        scaler, kept = self.run.scaler, about["scaler"]
        if scaler is not None and kept is not None and kept.keys() == scaler.state_dict().keys():  # of the same engine
            scaler.load_state_dict(kept)
        self._from = folder
        self.saved = about["step"] if folder.parent.resolve() == self.training.out.resolve() else None
        return Position(step=about["step"], updates=about["updates"])

    def _read(self, folder: Path) -> dict[str, Any]:
        """run.json, once every file has the checksum that it had when it was written; ranks share the reading."""
        try:
            about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
            names = sorted(about["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            lacks = "has no key " if isinstance(error, KeyError) else ""
            raise self._broken(folder, f"{ABOUT}: {lacks}{error}") from None
        ranks = distributed.get_world_size() if self.group is not None else 1
        wrong: list[str | None] = [wrong_one(folder, names[self._rank :: ranks], about["files"])]
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
                    remedy="say it as it was, or name another folder",
                )

    def _broken(self, folder: Path, why: str) -> InvalidInput:
        older = [path for _, path in complete(folder.parent) if path != folder]
        return InvalidInput(
            f"cannot be gone on from: {why}",
            key="checkpoint",
            value=str(folder),
            remedy=f"--resume {older[-1]} goes on from the one before" if older else "begin anew in another --out",
        )


# -- what is kept beside the run's own states


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


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """The whole parameters and buffers that a checkpoint has, on the CPU, by name; one process reads them all."""
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in there.items()
        if name.startswith(MODEL) and isinstance(one, TensorStorageMetadata)
    }
    try:
        load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except (CheckpointException, Exception) as error:
        raise UllageError(f"cannot be read: {reason_of(error)}", key="checkpoint", value=str(folder)) from None
    return {name.removeprefix(MODEL): value for name, value in state.items()}
