"""Choices of the degrees that divide blocks, looked at one by one as a search asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ullage.errors import UllageError
from ullage.job.job import Job, Layout
from ullage.planner.costs import GridCosts
from ullage.planner.exact import first_violation
from ullage.planner.wanted import Base


class Grids:
    """Choices of the degrees that divide blocks which differ in expert parallelism alone. refuse: of one that a check refuses."""

    def __init__(self, base: Base, refuse: Callable[[Job, UllageError], None]) -> None:
        self._base, self._refuse = base, refuse
        self._open: list[tuple[Job, dict[Layout, GridCosts]]] = []
        self._known: list[GridCosts] = []

    def add(self, job: Job, like: dict[Layout, GridCosts]) -> None:
        """like: of the same degrees with another loss."""
        self._open.append((job, like))

    def costs(self) -> Iterator[GridCosts]:
        """Those that may exist, each looked at when it is asked for."""
        at = 0
        while at < len(self._known) or self._open:
            if at < len(self._known):
                yield self._known[at]
                at += 1
                continue
            job, like = self._open.pop(0)
            broken = first_violation(job)
            if broken is not None:  # whatever the pipeline
                self._refuse(job, broken.error())
                continue
            beside = self._known[0] if self._known else None
            one = GridCosts(job, self._base.graph, like.get(job.layout), beside)
            like.setdefault(job.layout, one)
            self._known.append(one)
