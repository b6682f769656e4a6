"""What a training writes of its steps: a line of JSON each in metrics.jsonl, and TensorBoard's files where it is installed."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ullage.errors import InvalidInput
from ullage.train.answers import Step

FILE = "metrics.jsonl"
BOARD = "tensorboard"
_NOT_ON_BOARD = ("step", "steps", "skipped")


class Metrics:
    """Of a run that goes on after ``done`` steps: later lines, of a start that was killed, are dropped."""

    def __init__(self, out: Path, done: int) -> None:
        self.path = out / FILE
        try:
            kept = _up_to(self.path, done)
            part = self.path.with_suffix(".new")
            part.write_text(kept)
            part.rename(self.path)
            self._file = self.path.open("a")
        except OSError as error:
            raise self._full(error) from None
        self._board = _board(out / BOARD, done)

    def add(self, step: Step) -> None:
        row = asdict(step)
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._full(error) from None
        if self._board is not None:
            for name, value in row.items():
                if name not in _NOT_ON_BOARD and value is not None:
                    self._board.add_scalar(name, value, step.step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _full(self, error: OSError) -> InvalidInput:
        return InvalidInput(
            f"cannot be written: {error.strerror or os.strerror(error.errno or 0)}", key="--out", value=str(self.path)
        )


def _up_to(path: Path, done: int) -> str:
    """The lines of the first ``done`` steps; a torn one is none of them."""
    kept = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        try:
            if json.loads(line)["step"] <= done and line.endswith("\n"):
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return "".join(kept)


def _board(folder: Path, done: int) -> Any:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1)
