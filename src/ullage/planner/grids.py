"""Choices of the degrees that divide blocks, looked at one by one as a search asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ullage.errors import Infeasible, UllageError, Unsupported
from ullage.job.job import Job
from ullage.planner.costs import ExpertsSeconds, GridCosts
from ullage.planner.exact import refusal
from ullage.planner.growing import Sizes
from ullage.planner.space import Space
from ullage.planner.wanted import Base

Grid = tuple[GridCosts, ...]
"""A choice of the degrees that divide blocks, under each loss that may be."""


class Grids:
    """Choices of the degrees that divide blocks which differ in expert parallelism alone.

    refuse: of one that a check refuses. experts_s: of each kind seconds of its experts (``GridCosts``), known to all grids of the base.
    sizes: their micro-batches.
    """

    def __init__(
        self,
        base: Base,
        refuse: Callable[[Job, UllageError], None],
        experts_s: ExpertsSeconds | None = None,
        sizes: Sizes = (),
    ) -> None:
        self._base, self._refuse, self._sizes = base, refuse, sizes
        self._experts_s: ExpertsSeconds = {} if experts_s is None else experts_s
        self._open: list[list[Job]] = []
        self._known: list[Grid] = []

    def add(self, jobs: list[Job]) -> None:
        """jobs: the same degrees with each loss."""
        self._open.append(jobs)

    def costs(self) -> Iterator[Grid]:
        """Those that may exist, each looked at when it is asked for."""
        at = 0
        while at < len(self._known) or self._open:
            if at < len(self._known):
                yield self._known[at]
                at += 1
                continue
            found = self._under_each_loss(self._open.pop(0))
            if found:
                self._known.append(found)

    def _under_each_loss(self, jobs: list[Job]) -> Grid:
        beside = {one.job.loss: one for one in self._known[0]} if self._known else {}
        found: list[GridCosts] = []
        for job in jobs:
            refused = refusal(job)
            if refused is not None:  # whatever the pipeline
                self._refuse(job, refused)
                continue
            like = found[0] if found else None
            found.append(GridCosts(job, self._base.graph, like, beside.get(job.loss), self._experts_s, self._sizes))
        return tuple(found)


def least_dense_s(grid: Grid, micro_batch: int) -> float:
    """Seconds of what no expert does, under whichever of a grid's losses takes least of those that can be told."""
    found: list[float] = []
    for one in grid:
        try:
            found.append(one.dense_s(micro_batch))
        except (Unsupported, Infeasible) as error:
            refused = error
    if not found:
        raise refused
    return min(found)


def grids_of(space: Space, base: Base, refuse: Callable[..., None]) -> tuple[list[Grids], int]:
    """Degrees that divide blocks, under each loss, together those that differ in expert parallelism alone; and how many strategies all of
    them have. refuse: with the number of strategies that a check refuses."""
    found: dict[object, Grids] = {}
    experts_s: ExpertsSeconds = {}
    count = 0
    for jobs in space.grids(base):
        sizes = space.sizes(base, jobs[0])
        strategies = sum(sizes.values())
        count += len(jobs) * strategies
        if strategies:
            layout = jobs[0].layout
            key = layout.tp, layout.cp, layout.sp
            if key not in found:
                found[key] = Grids(base, partial(refuse, strategies=strategies), experts_s, tuple(sizes))
            found[key].add(jobs)
    return list(found.values()), count
