"""What a run has beside its job. No torch here: a command reads it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ullage.errors import Contradiction, InvalidInput
from ullage.frozen import frozen

LrSchedule = Literal["cosine", "constant"]
LR_SCHEDULES = ("cosine", "constant")


@frozen
class Settings:
    """seed: of the weights and of the data's order. data: token files; none: random tokens from the seed. weights: a folder with
    safetensors to start from; None: weights are drawn.
    """

    steps: int = 20
    lr: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 0
    data: tuple[Path, ...] = ()
    weights: Path | None = None

    def __post_init__(self) -> None:
        _refuse(
            ("--steps", self.steps, self.steps < 1, "1 or more"),
            *_of_every_run(self),
        )


@frozen
class Training:
    """data: token files, or texts and rows (documents.py). out: the folder of all that the run writes.

    steps, epochs: one of the two; neither: once over the data. lr: at its highest, after warmup_steps; lr_schedule: down to 0 along a
    cosine, or as it is. weights: as in Settings. tokenizer: a folder; None: that of weights, or of the model. save_every: steps between
    checkpoints; the last step is always one. keep: how many are left. resume: "auto" goes on from the latest in ``out``, "never" begins
    anew, a folder names the checkpoint. force: start although the estimate does not fit. memory_budget: bytes that a rank's allocator may
    hold (memory.py); None: the card's.
    """

    data: tuple[Path, ...]
    out: Path
    steps: int | None = None
    epochs: int | None = None
    lr: float = 3e-4
    lr_schedule: LrSchedule = "cosine"
    warmup_steps: int = 0
    weight_decay: float = 0.01
    seed: int = 0
    weights: Path | None = None
    tokenizer: Path | None = None
    save_every: int = 500
    keep: int = 2
    resume: str | Path = "auto"
    force: bool = False
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise Contradiction("says how long to train, and so does --epochs", key="--steps", remedy="keep one")
        if not self.data:
            raise InvalidInput("names no file", key="--data", allowed="texts, JSON lines, Parquet or token files")
        counts = (
            ("--steps", self.steps),
            ("--epochs", self.epochs),
            ("--save-every", self.save_every),
            ("--keep", self.keep),
        )
        _refuse(
            *((key, value, value is not None and value < 1, "1 or more") for key, value in counts),
            ("--memory-budget", self.memory_budget, self.memory_budget == 0, "a size above 0, such as 2GiB"),
            ("--warmup-steps", self.warmup_steps, self.warmup_steps < 0, "0 or more"),
            ("--lr-schedule", self.lr_schedule, self.lr_schedule not in LR_SCHEDULES, ", ".join(LR_SCHEDULES)),
            *_of_every_run(self),
        )


_Check = tuple[str, object, bool, str]


def _of_every_run(one: Settings | Training) -> tuple[_Check, ...]:
    return (
        ("--lr", one.lr, not 0 < one.lr < 1e6, "a number above 0"),
        ("--weight-decay", one.weight_decay, not 0 <= one.weight_decay < 1e6, "0 or more"),
        ("--seed", one.seed, not 0 <= one.seed < 2**63, "0 to 2^63 - 1"),
    )


def _refuse(*checks: _Check) -> None:
    for key, value, wrong, allowed in checks:
        if wrong:
            raise InvalidInput("is out of range", key=key, value=value, allowed=allowed)
