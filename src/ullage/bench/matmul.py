"""Matrix products in the layouts of a linear's forward and backward, and many small ones at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from ullage.bench.clock import Clock, Task
from ullage.hardware.measured import Direction, Multiplied

BATCH = 8
"""Products of a batched one: the heads of a small model."""
_FIRST_GUESS = 1e10


@dataclass(kw_only=True)
class Grid:
    """A task for each combination of the axes. A product that would take too long by its smaller neighbour's rate has none: it takes
    that rate."""

    dtype: str
    direction: Direction
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    tasks: dict[tuple[int, int, int], Task] = field(default_factory=dict)

    def flops(self, shape: tuple[int, int, int]) -> int:
        m, n, k = shape
        return 2 * m * n * k * (BATCH if self.direction == "batched" else 1)

    def shapes(self) -> Iterator[tuple[int, int, int]]:
        return product(self.m, self.n, self.k)

    def result(self, seconds: dict[int, float]) -> Multiplied:
        """seconds: by task."""
        rates: dict[tuple[int, int, int], float] = {}
        for shape in self.shapes():
            task = self.tasks.get(shape)
            rates[shape] = self.flops(shape) / seconds[id(task)] if task else rates[self._smaller(shape, rates)]
        m, n, k = (tuple(map(float, axis)) for axis in (self.m, self.n, self.k))
        return Multiplied(
            dtype=self.dtype,
            direction=self.direction,
            m=m,
            n=n,
            k=k,
            flops_per_s=tuple(rates[one] for one in self.shapes()),
        )

    def _smaller(self, shape: tuple[int, int, int], known: dict[tuple[int, int, int], float]) -> tuple[int, int, int]:
        """The largest neighbour below: one axis a step back."""
        axes = (self.m, self.n, self.k)
        below = [
            (*shape[:at], axis[axis.index(shape[at]) - 1], *shape[at + 1 :])
            for at, axis in enumerate(axes)
            if axis.index(shape[at])
        ]
        return max((one for one in below if one in known), key=self.flops)

    def plan(self, clock: Clock, dtype: torch.dtype, longest_s: float) -> None:
        """Makes the tasks, the same ones on every rank, from one call of each. longest_s: what a call may take."""
        rates: dict[tuple[int, int, int], float] = {}
        for shape in self.shapes():
            guess = rates[self._smaller(shape, rates)] if rates else _FIRST_GUESS
            if self.flops(shape) / guess > longest_s:
                rates[shape] = guess
                continue
            made = _maker(self.direction, shape, clock.device, dtype)
            rates[shape] = self.flops(shape) / clock.tried(made())
            self.tasks[shape] = Task(prepared=made)


def _maker(
    direction: Direction, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Callable[[], Callable[[], object]]:
    m, n, k = shape

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device).to(dtype)

    def made() -> Callable[[], object]:
        if direction == "forward":  # x [m, k] by the weight [n, k]
            x, weight = drawn(m, k), drawn(n, k)
            return lambda: x @ weight.T
        if direction == "dgrad":  # the output's gradient [m, k] by the weight [k, n]
            gradient, weight = drawn(m, k), drawn(k, n)
            return lambda: gradient @ weight
        if direction == "wgrad":  # the output's gradient [k, m] by x [k, n]
            gradient, x = drawn(k, m), drawn(k, n)
            return lambda: gradient.T @ x
        one, other = drawn(BATCH, m, k), drawn(BATCH, k, n)
        return lambda: torch.bmm(one, other)

    return made
