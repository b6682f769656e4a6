"""Timing in rounds: every figure is the least of its repeats, and those are spread over the whole measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import distributed

_SHORTEST_S = 2e-3
"""A repeat goes on for as long, so that the clock's own grain and one interrupt do not count."""
_LONGEST_S = 0.4
"""A figure whose single call takes longer gets one repeat a round and no more calls."""


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
            first = self.seconds(run, 1)
            calls = 1 if first > _LONGEST_S else max(1, round(_SHORTEST_S / max(first, 1e-7)))
            calls = round(self._agreed(calls))
            task.seconds.append(min(first, self.seconds(run, calls)) if calls > 1 else first)

    def seconds(self, run: Callable[[], object], calls: int) -> float:
        """Of one call, the mean of some."""
        self._settle()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        self._settle()
        return (time.perf_counter() - began) / calls

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
