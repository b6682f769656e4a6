"""``watch``: one line around any loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch import distributed
from torch.nn import Module
from torch.optim import Optimizer

from ullage.engines.estimate import Estimate, estimate
from ullage.errors import UllageError
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.report.console import plain
from ullage.report.watched import watched_text
from ullage.report.why import why_report
from ullage.train.oom import explained
from ullage.train.watched import Held, Watched
from ullage.watching.actual import actual

if TYPE_CHECKING:
    from ullage.postmortem.why import Why

__all__ = ["Module", "Optimizer", "Say", "Watch", "to_stderr"]

Say = Callable[[str], None]


class Watch:
    """What ``ullage.watch`` returns. watched: what the loop held, once it has ended. why: what it ran out of, where it did."""

    def __init__(
        self,
        job: Job | str | Path | Mapping[str, object],
        model: Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        say: Say | None = None,
    ) -> None:
        self.job = job if isinstance(job, Job) else read_job(job)
        self.watched: Watched | None = None
        self.why: Why | None = None
        self._say = say or to_stderr
        self._expected, self._unmodelled = _expected(self.job)
        self._actual = actual(model, optimizer)

    def __enter__(self) -> Watch:
        self._actual.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watched = self.stop()
        if error is None:
            self._say(watched_text(watched))
        else:
            self.explain(error)

    @property
    def followed_steps(self) -> int:
        """Steps whose storages were followed, which takes time; none where the allocator counts for itself."""
        return self._actual.steps if self._actual.how == "storages" else 0

    def stop(self) -> Watched:
        """Measures no more."""
        held = self._actual.stop()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
        ranks = self.job.layout.world
        self.watched = Watched(
            device=self._actual.device,
            rank=rank,
            how=self._actual.how,
            actual=held,
            predicted=_of_rank(self._expected, rank, self._actual.how) if self._expected is not None else None,
            moment=self._expected.peak.moment if self._expected is not None else "",
            steps=self._actual.steps,
            unmodelled=self._unmodelled,
            notes=(f"the job has {ranks} ranks, and the run has {world}",) if ranks != world else (),
        )
        return self.watched

    def explain(self, error: BaseException) -> None:
        """Adds to an exception that tells of memory why that was, and what helps."""
        self.why = explained(error, self.job)
        if self.why is not None:
            error.add_note(plain(why_report(self.why)))


def _expected(job: Job) -> tuple[Estimate | None, str | None]:
    """A loop runs as well without a prediction."""
    try:
        return estimate(job), None
    except UllageError as error:
        return None, str(error)


def _of_rank(expected: Estimate, rank: int, how: str) -> Held:
    """The estimate of one rank; on the CPU without the workspaces of GPU libraries, and no more than what is allocated."""
    found = next((one for one in expected.ranks if rank in one.ranks), expected.ranks[0])
    if how == "allocator":
        return Held(
            allocated_bytes=found.allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            device_bytes=found.device_bytes,
        )
    workspace = sum(line.bytes for line in expected.ledger if line.category == "workspace")
    return Held(allocated_bytes=found.allocated_bytes - workspace)


def to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
