"""Timing in rounds: every figure is the least of its repeats, and those are spread over the whole measurement.

As in a step, what an op reads and where it writes is not in the cache from the call before: operands are views at other places of a
``Pool`` in each call, and results are kept for a while, so that the next ones lie elsewhere.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median

import torch
from torch import distributed

_ENOUGH_S = 10e-3
"""A repeat goes on for as long, so that an interrupt does not count."""
_MOST_CALLS = 200
_MEANS = 10
_GRAIN_S = 1e-7
_KEPT = 8
"""Results that are kept while the next ones are made."""


class Pool:
    """Memory larger than the caches, of one type. Its numbers are random: a processor works less on equal ones."""

    def __init__(self, device: torch.device, dtype: torch.dtype, n_bytes: int) -> None:
        self.itemsize = dtype.itemsize
        self._flat = torch.randn(n_bytes // dtype.itemsize, device=device, dtype=torch.float32).to(dtype)
        self._next = 0

    def view(self, *size: int) -> torch.Tensor:
        """A tensor over memory that no view has used for as long as there is other."""
        numel = math.prod(size)
        if self._next + numel > self._flat.numel():
            self._next = 0
        start, self._next = self._next, self._next + numel
        return self._flat[start : start + numel].view(size)


COPIES = 8
"""Of an op's operands, or of a backward's graph, so that the same is not run twice in a row: what it reads is in the cache no more."""


def in_turn(runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Each call the next one."""
    following = cycle(runs)
    return lambda: next(following)()


@dataclass(kw_only=True)
class Task:
    """One figure. prepared: makes what is timed, once a round, so that its memory is free in between. seconds: of each round."""

    prepared: Callable[[], Callable[[], object]]
    seconds: list[float] = field(default_factory=list)

    @property
    def least_s(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        return median(self.seconds) / self.least_s - 1


def task_of(run: Callable[[], object]) -> Task:
    """Of what needs nothing made for it."""
    return Task(prepared=lambda: run)


class Clock:
    """Runs tasks on this rank while the other ranks run theirs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def round(self, tasks: list[Task]) -> None:
        """Each task once more."""
        for task in tasks:
            run = task.prepared()
            self.together()
            run()
            first = self._agreed(self.seconds(run, 1))
            calls = min(_MOST_CALLS, round(_ENOUGH_S / max(first, _GRAIN_S)))
            task.seconds.append(self.seconds(run, calls) if calls > 1 else first)

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Of one call: the lower quartile of some, or of means where one is short for the clock."""
        kept: deque[object] = deque(maxlen=_KEPT)
        found = []
        each = 1 if calls < _MOST_CALLS else _MOST_CALLS // _MEANS
        for _ in range(calls // each):
            self._settle()
            began = time.perf_counter()
            for _ in range(each):
                kept.append(run())
            self._settle()
            found.append((time.perf_counter() - began) / each)
        return sorted(found)[len(found) // 4]

    def tried(self, run: Callable[[], object]) -> float:
        """Seconds of one call, after one that warms up; of the slowest rank, so that all decide alike."""
        run()
        return self._agreed(self.seconds(run, 1))

    def together(self) -> None:
        """Waits for the other ranks."""
        self._settle()
        if distributed.is_initialized():
            distributed.barrier()

    def _agreed(self, number: float) -> float:
        """The largest of all ranks', on every rank: what is timed may be a collective."""
        if not distributed.is_initialized():
            return number
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return float(found)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def slowest_of_ranks(tasks: list[Task], device: torch.device) -> list[float]:
    """Least seconds of each task, of the rank that is slowest in it: the others wait for that one in a step."""
    found = torch.tensor([task.least_s for task in tasks], dtype=torch.float64, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return [float(one) for one in found]
