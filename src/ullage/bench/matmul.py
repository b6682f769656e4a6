"""Matrix products in the layouts of a linear's forward and backward, and many small ones at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from ullage.bench.clock import Clock, Pool, Task, task_of
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

    def plan(self, clock: Clock, pool: Pool, longest_s: float) -> None:
        """Makes the tasks, the same ones on every rank, from one call of each. longest_s: what a call may take."""
        rates: dict[tuple[int, int, int], float] = {}
        for shape in self.shapes():
            guess = rates[self._smaller(shape, rates)] if rates else _FIRST_GUESS
            if self.flops(shape) / guess > longest_s:
                rates[shape] = guess
                continue
            run = _run(self.direction, shape, pool)
            rates[shape] = self.flops(shape) / clock.tried(run)
            self.tasks[shape] = task_of(run)


def _run(direction: Direction, shape: tuple[int, int, int], pool: Pool) -> Callable[[], object]:
    m, n, k = shape
    if direction == "forward":  # x [m, k] by the weight [n, k]
        return lambda: pool.view(m, k) @ pool.view(n, k).T
    if direction == "dgrad":  # the output's gradient [m, k] by the weight [k, n]
        return lambda: pool.view(m, k) @ pool.view(k, n)
    if direction == "wgrad":  # the output's gradient [k, m] by x [k, n]
        return lambda: pool.view(k, m).T @ pool.view(k, n)
    return lambda: torch.bmm(pool.view(BATCH, m, k), pool.view(BATCH, k, n))
