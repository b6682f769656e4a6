"""Each record's job estimated and held against what was measured of it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ullage.engines.base import Account
from ullage.engines.estimate import Estimate, RankEstimate, estimate
from ullage.engines.interval import Interval, interval, kind
from ullage.engines.registry import account, ranks_of
from ullage.errors import UllageError
from ullage.frozen import frozen
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.memory.overhead import outside_allocator
from ullage.timing.step import step_time
from ullage.validation import summary
from ullage.validation.coverage import Coverage, coverage
from ullage.validation.records import PREDICTED_TIME, Record, Records, Rejected, rejected_for
from ullage.validation.summary import Summary

VERDICTS = ("fits", "tight", "oom")
# What the verdict says of "it fits", as a number: tight is neither.
_AS_NUMBER = {"fits": 1.0, "tight": 0.5, "oom": 0.0}


@frozen
class Row:
    """One quantity of one record. Memory in bytes, times in seconds; for ``fits``: 1 it does, 0 it does not, 0.5 tight, and no error_ratio.

    error_ratio: predicted / measured - 1. low..high: the estimate's interval, for this quantity. kind: what is most uncertain in the job
    (engines/interval.py). residual: log(measured / predicted) of memory; overheads outside the allocator are taken away from both.
    """

    id: str
    source: str
    grade: str
    quantity: str
    measured: float
    predicted: float
    error_ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    fits: bool | None
    file: str = ""
    stage: int | None = None
    kind: str = ""
    residual: float | None = None

    @property
    def covered(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What ``ullage validate`` answers. rows: one for each quantity of each record that could be estimated.

    skipped: files that hold no jobs.
    """

    rows: tuple[Row, ...]
    unsupported: tuple[Rejected, ...]
    records: int
    skipped: tuple[str, ...] = ()

    @cached_property
    def summary(self) -> tuple[Summary, ...]:
        return summary.by_quantity(self.rows)

    @cached_property
    def by_size(self) -> tuple[Summary, ...]:
        return summary.by_size(self.rows)

    @cached_property
    def by_file(self) -> tuple[Summary, ...]:
        return summary.by_file(self.rows)

    @cached_property
    def coverage(self) -> Coverage | None:
        return coverage(self.rows)

    @cached_property
    def verdicts(self) -> dict[str, int]:
        """``fits_called_oom`` and its like: how often each verdict was given to runs that fitted, and to those that did not."""
        counts = {f"{truth}_called_{verdict}": 0 for truth in ("fits", "oom") for verdict in VERDICTS}
        for row in self.rows:
            if row.quantity == "fits":
                counts[f"{'fits' if row.fits else 'oom'}_called_{row.verdict}"] += 1
        return counts


def compare(found: Records, progress: Callable[[int, int], None] | None = None) -> Validation:
    """Every record in turn."""
    rows: list[Row] = []
    rejected = list(found.rejected)
    for done, record in enumerate(found.records, start=1):
        try:
            for row in _rows(record):
                rows.append(row)  # one by one: a time that is not known takes no memory away
        except UllageError as error:
            rejected.append(rejected_for(error, record.id, record.file))
        except Exception as error:  # ours: one record's crash must not hide all others
            why = _bug(error)
            rejected.append(Rejected(id=record.id, why=why, short=why, file=record.file))
        if progress is not None:
            progress(done, len(found.records))
    return Validation(
        rows=tuple(rows),
        unsupported=tuple(rejected),
        records=len(found.records) + len(found.rejected),
        skipped=found.skipped,
    )


BUG = "a bug in ullage"


def _bug(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}" if trace is not None else ""
    text = re.sub(r" \(/[^)]*\)", "", " ".join(str(error).split()))  # an ImportError names a file of this machine
    return f"{BUG}: {type(error).__name__}: {text}{where}"


def _rows(record: Record) -> Iterator[Row]:
    job = read_job(record.job)
    answer = estimate(job)
    for quantity, measured in record.memory.items():
        predicted = _predicted(job, answer, quantity, record.rank)
        yield _row(
            record,
            answer,
            quantity,
            predicted=predicted.bytes,
            error_ratio=predicted.bytes / measured - 1,
            measured=measured,
            low=predicted.low,
            high=predicted.high,
            stage=predicted.stage,
            kind=kind(job, _account(job, predicted.stage)),
            residual=_residual(measured - predicted.outside, predicted.bytes - predicted.outside),
        )
    if record.fits is not None:
        yield _row(record, answer, "fits", measured=float(record.fits), predicted=_AS_NUMBER[answer.verdict])
    yield from _time_rows(record, job, answer)


def _time_rows(record: Record, job: Job, answer: Estimate) -> Iterator[Row]:
    """The step's seconds, or where only they are stated its tokens a second: both are one measurement."""
    quantity = next((name for name in PREDICTED_TIME if name in record.time), None)
    if quantity is None:
        return
    found = step_time(job)
    predicted = found.step_s if quantity == "step_s" else found.tokens_per_s_per_gpu
    measured = record.time[quantity]
    yield _row(record, answer, quantity, measured=measured, predicted=predicted, error_ratio=predicted / measured - 1)


def _row(
    record: Record,
    answer: Estimate,
    quantity: str,
    *,
    measured: float,
    predicted: float,
    error_ratio: float | None = None,
    low: float | None = None,
    high: float | None = None,
    stage: int | None = None,
    kind: str = "",
    residual: float | None = None,
) -> Row:
    return Row(
        id=record.id,
        source=record.source,
        grade=record.grade,
        quantity=quantity,
        measured=measured,
        predicted=predicted,
        error_ratio=error_ratio,
        low=low,
        high=high,
        verdict=answer.verdict,
        fits=record.fits,
        file=record.file,
        stage=stage,
        kind=kind,
        residual=residual,
    )


def _residual(measured: float, predicted: float) -> float | None:
    """None where less was measured than the overheads outside the allocator alone."""
    return math.log(measured / predicted) if measured > 0 else None


@frozen
class _Predicted:
    """outside: bytes of it outside the allocator."""

    bytes: int
    low: int
    high: int
    outside: int
    stage: int


def _predicted(job: Job, answer: Estimate, quantity: str, rank: str | int) -> _Predicted:
    """The quantity on the measured rank."""
    size = _SIZES[_unspecified(job) if quantity == "unspecified" else quantity]
    stages = list(_measured_stages(answer, rank))
    worst = max(stages, key=size)
    bracket = _bracket(job, worst, quantity, size(worst))
    return _Predicted(
        bytes=size(worst),
        low=bracket.low_bytes,
        high=bracket.high_bytes,
        outside=worst.device_bytes - worst.reserved_bytes if quantity == "device" else 0,
        stage=worst.stage,
    )


_SIZES: dict[str, Callable[[RankEstimate], int]] = {
    "allocated": lambda stage: stage.allocated_bytes,
    "reserved": lambda stage: stage.reserved_bytes,
    "device": lambda stage: stage.device_bytes,
}

TORCHTUNE_ACTIVE_SINCE = "2024-09-24"
"""When torchtune's README was last measured anew (30b8519e8, in GiB). Where its tables name what they hold, it is active bytes, which its
logger has first (training/memory.py, get_memory_stats); what that day's table has and no record here, 37.4 and 30.3 GiB of 8B without
recomputation and 7.4 of QLoRA, is allocated to 0.2, 0.3 and 3 %."""


def _unspecified(job: Job) -> str:
    """What stands for a figure whose source does not say which memory it is: what is reserved, which a card shows but for what lies outside
    the allocator; for a tool that shows no card, what that prints."""
    prints = job.stack == "torchtune" and (job.stack_version is None or job.stack_version >= TORCHTUNE_ACTIVE_SINCE)
    return "allocated" if prints else "reserved"


def _measured_stages(answer: Estimate, rank: str | int) -> Iterator[RankEstimate]:
    """max: every stage; last: the last one; a number: that stage, or the one that holds this global rank."""
    if rank == "max":
        yield from answer.ranks
    elif rank == "last":
        yield max(answer.ranks, key=lambda stage: stage.stage)
    else:
        stages = {stage.stage: stage for stage in answer.ranks}
        if isinstance(rank, int) and rank in stages:
            yield stages[rank]
        else:
            yield next((stage for stage in answer.ranks if rank in stage.ranks), answer.ranks[0])


def _bracket(job: Job, stage: RankEstimate, quantity: str, size: int) -> Interval:
    """The interval brackets the device; inside the allocator it is the same doubts without the overheads outside of it."""
    found = _account(job, stage.stage)
    if quantity == "device":
        return interval(
            job, found, stage.reserved_bytes, outside_allocator(job.cluster, found.groups, eager=found.eager)
        )
    return interval(job, found, size, ())


def _account(job: Job, stage: int) -> Account:
    built = graph_of(job)
    return account(job, built, ranks_of(job, built)[stage])
