"""What a run has beside its job. No torch here: a command reads it at once."""

from __future__ import annotations

from pathlib import Path

from ullage.errors import InvalidInput
from ullage.frozen import frozen


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
        for key, value, wrong, allowed in (
            ("--steps", self.steps, self.steps < 1, "1 or more"),
            ("--lr", self.lr, not 0 < self.lr < 1e6, "a number above 0"),
            ("--weight-decay", self.weight_decay, not 0 <= self.weight_decay < 1e6, "0 or more"),
            ("--seed", self.seed, not 0 <= self.seed < 2**63, "0 to 2^63 - 1"),
        ):
            if wrong:
                raise InvalidInput("is out of range", key=key, value=value, allowed=allowed)
