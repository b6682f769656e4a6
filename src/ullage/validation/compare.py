"""Each record's job estimated and held against what was measured of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ullage.engines.base import Account
from ullage.engines.estimate import Estimate, RankEstimate, estimate
from ullage.engines.interval import Bracket, Spread, bracket, kind, spread
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
    and bracket what it leaves open in bytes (engines/interval.py); of memory.
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
    bracket: Bracket | None = None

    @property
    def covered(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= self.measured <= self.high

    def held_by(self, one: Spread) -> bool:
        """Whether this spread would cover what was measured."""
        if self.bracket is None:
            return False
        found = self.bracket.widened(one)
        return found.low_bytes <= self.measured <= found.high_bytes

    @property
    def beyond(self) -> tuple[float, float]:
        """log of the shares of its bracket's least and most that was measured: a residual for each end of the interval."""
        assert self.bracket is not None
        return self.bracket.beyond(self.measured)


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
            stage=predicted.stage,
            kind=predicted.kind,
            bracket=predicted.bracket,
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
    stage: int | None = None,
    kind: str = "",
    bracket: Bracket | None = None,
) -> Row:
    found = bracket.widened(spread(kind)) if bracket is not None else None
    return Row(
        id=record.id,
        source=record.source,
        grade=record.grade,
        quantity=quantity,
        measured=measured,
        predicted=predicted,
        error_ratio=error_ratio,
        low=found.low_bytes if found else None,
        high=found.high_bytes if found else None,
        verdict=answer.verdict,
        fits=record.fits,
        file=record.file,
        stage=stage,
        kind=kind,
        bracket=bracket,
    )


@frozen
class _Predicted:
    bytes: int
    stage: int
    kind: str
    bracket: Bracket


def _predicted(job: Job, answer: Estimate, quantity: str, rank: str | int) -> _Predicted:
    """The quantity on the measured rank."""
    quantity = _unspecified(job) if quantity == "unspecified" else quantity
    size = _SIZES[quantity]
    worst = max(_measured_stages(answer, rank), key=size)
    found = _account(job, worst.stage)
    return _Predicted(
        bytes=size(worst), stage=worst.stage, kind=kind(job, found), bracket=_bracket(job, found, worst, quantity)
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


def _bracket(job: Job, found: Account, stage: RankEstimate, quantity: str) -> Bracket:
    """The interval brackets the device; inside the allocator it is the same doubts without the overheads outside of it, and of what is
    allocated without its cache."""
    if quantity == "allocated":
        return bracket(job, found, stage.allocated_bytes, (), cached=False)
    outside = outside_allocator(job.cluster, found.groups, eager=found.eager) if quantity == "device" else ()
    return bracket(job, found, stage.reserved_bytes, outside)


def _account(job: Job, stage: int) -> Account:
    built = graph_of(job)
    return account(job, built, ranks_of(job, built)[stage])
