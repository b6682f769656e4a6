"""What to change: each change estimated as a whole job, ranked by seconds lost for bytes freed, up to the first that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from math import inf

from ullage.engines.changes import Change, changed, freeing, merged
from ullage.engines.estimate import Estimate, estimate, rank_peak
from ullage.engines.interval import interval
from ullage.engines.registry import ranks_of
from ullage.errors import UllageError
from ullage.frozen import FrozenMap, frozen
from ullage.job.adapted import graph_of
from ullage.job.fields import show
from ullage.job.job import Job
from ullage.memory.overhead import outside_allocator
from ullage.postmortem.outside_step import ROOMY
from ullage.postmortem.tried import EXPANDABLE, WORK, off_host, others, shorter
from ullage.timing.step import step_time

Edit = Callable[[Change], str | None]
"""A change as a unified diff of a person's own file; None where it is not the file's to say."""

_MOST_TOGETHER = 4
_MOST_SHOWN = 6


@frozen
class Advice:
    """change: dotted job keys. frees_bytes: of the card at the peak; slowdown_ratio: the step's time after over before (None: not
    known); low_bytes..high_bytes: the estimate after it (None: the tensors alone pass the card). host_bytes: of a node's own memory after
    it, where states are on the host, and frees_host_bytes less than before; verdict_after is of both, where a node's memory is known."""

    change: FrozenMap
    what: str
    frees_bytes: int
    slowdown_ratio: float | None
    verdict_after: str
    low_bytes: int | None = None
    high_bytes: int | None = None
    edit: str | None = None
    host_bytes: int = 0
    frees_host_bytes: int = 0


@frozen
class Least:
    """peak_bytes: allocated on the rank that holds most. high_bytes: the high estimate of its device, were nothing of the allocator's
    wasted. host_bytes: of a node."""

    peak_bytes: int
    high_bytes: int
    host_bytes: int


class Option:
    """A change and the job that it makes. What is known of it is found out when it is asked for."""

    def __init__(self, change: Change, job: Job) -> None:
        self.change = change
        self.job = job

    @cached_property
    def seconds(self) -> float | None:
        return seconds(self.job)

    @cached_property
    def least(self) -> Least | None:
        """None where no account models it."""
        try:
            return least(self.job)
        except UllageError:
            return None

    @property
    def peak_bytes(self) -> int:
        assert self.least is not None, "what is not modelled is no option"
        return self.least.peak_bytes

    @property
    def host_bytes(self) -> int:
        return self.least.host_bytes if self.least is not None else 0

    @property
    def may_fit(self) -> bool:
        return (
            self.least is not None
            and self.least.high_bytes < self.job.cluster.device.capacity_bytes
            and self.on_host <= 1
        )

    @property
    def on_host(self) -> float:
        """The share of a node's memory that is asked of it, 0 where it is not known."""
        memory = self.job.cluster.host_memory_bytes
        return self.host_bytes / memory if memory else 0.0

    @cached_property
    def after(self) -> Estimate | None:
        """None where the tensors alone pass the card, so that its allocator need not be played."""
        if self.peak_bytes > self.job.cluster.device.capacity_bytes:
            return None
        return estimate(self.job)

    @property
    def verdict(self) -> str:
        card = self.after.verdict if self.after is not None and self.on_host <= 1 else "oom"
        return "tight" if card == "fits" and self.on_host > ROOMY else card


class Search:
    """Changes of one job. edit: see Edit; None where the job came from no file of a person's own."""

    def __init__(self, job: Job, edit: Edit | None) -> None:
        self.job = job
        self.edit = edit
        self.before = estimate(job)
        self.seconds = seconds(job)
        self.least = least(job)
        self.peak_bytes = self.least.peak_bytes

    def found(self) -> Iterator[Advice]:
        """Single changes by rank, up to the first that fits; where none does, they are put together until they do."""
        options = []
        shown = 0
        for option in self._ranked():
            options.append(option)
            if len(options) > _MOST_SHOWN:
                continue
            advice = self._advice(option)
            if advice.frees_bytes <= 0:
                continue
            shown += 1
            yield advice
            if advice.verdict_after == "fits":
                return
        if shown > 1:
            yield from self._together(options)

    def on_host(self) -> Iterator[Advice]:
        """What leaves a node more of its own memory, by seconds lost for its bytes, up to the first that fits."""
        before = self.least.host_bytes
        options = [
            option
            for change in off_host(self.job)
            if (job := changed(self.job, change)) is not None
            and (option := Option(change, job)).least is not None
            and option.host_bytes < before
        ]
        for option in sorted(options, key=lambda one: self._lost(one) / (before - one.host_bytes)):
            yield self._advice(option)
            if option.verdict == "fits" and self.job.cluster.host_memory_bytes is not None:
                return

    def _ranked(self) -> Iterator[Option]:
        """By seconds lost for each byte freed, a change of the work itself last. What loses none is first, and is looked at by itself."""
        options = [
            Option(change, job)
            for change in (*others(self.job), *freeing(self.job), *shorter(self.job))
            if (job := changed(self.job, change)) is not None
        ]
        free = [option for option in options if not self._lost(option)]
        yield from filter(self._helps, free)
        yield from sorted((option for option in options if option not in free and self._helps(option)), key=self._cost)

    def _helps(self, option: Option) -> bool:
        return (
            option.least is not None
            and option.on_host <= 1
            and (option.peak_bytes < self.peak_bytes or EXPANDABLE in option.change)
        )

    def _lost(self, option: Option) -> float:
        """Seconds of a step; of a change of the work itself none are comparable."""
        if WORK in option.change:
            return inf
        if option.seconds is None or self.seconds is None:
            return 0.0
        return max(0.0, option.seconds - self.seconds)

    def _cost(self, option: Option) -> float:
        return self._lost(option) / max(1, self.peak_bytes - option.peak_bytes)

    def _advice(self, option: Option) -> Advice:
        peak = option.after.peak if option.after is not None else None
        ratio = option.seconds / self.seconds if option.seconds is not None and self.seconds else None
        freed = (
            self.before.peak.device_bytes - peak.device_bytes
            if peak is not None
            else self.peak_bytes - option.peak_bytes
        )
        return Advice(
            change=FrozenMap(option.change),
            what=_words(option.change),
            frees_bytes=freed,
            slowdown_ratio=ratio,
            verdict_after=option.verdict,
            low_bytes=peak.low_bytes if peak is not None else None,
            high_bytes=peak.high_bytes if peak is not None else None,
            edit=self.edit(option.change) if self.edit is not None else None,
            host_bytes=option.host_bytes,
            frees_host_bytes=self.least.host_bytes - option.host_bytes,
        )

    def _together(self, options: list[Option]) -> Iterator[Advice]:
        """By rank, of changes of the same keys the one that frees most, until the job fits; then each that it fits without is left out."""
        chosen: list[Option] = []
        for option in _strongest(options):
            chosen.append(option)
            if len(chosen) > 1 and self._fits(chosen):
                break
            if len(chosen) == _MOST_TOGETHER:
                break
        else:
            if len(chosen) < 2:
                return
        for option in chosen[:-1]:
            fewer = [one for one in chosen if one is not option]
            if len(fewer) > 1 and self._fits(fewer):
                chosen = fewer
        both = self._merged(chosen)
        if both is not None and both.least is not None:
            yield self._advice(both)

    def _merged(self, chosen: list[Option]) -> Option | None:
        change = merged(one.change for one in chosen)
        job = changed(self.job, change)
        return None if job is None else Option(change, job)

    def _fits(self, chosen: list[Option]) -> bool:
        both = self._merged(chosen)
        return both is not None and both.may_fit and both.verdict == "fits"


def _strongest(options: list[Option]) -> Iterator[Option]:
    """Of those that change the same keys the one that frees most, where the first of them stood; what frees nothing by itself last."""
    best: dict[frozenset[str], Option] = {}
    for option in options:
        keys = frozenset(option.change)
        if keys not in best or option.peak_bytes < best[keys].peak_bytes:
            best[keys] = option
    taken: set[str] = set()
    for option in sorted(best.values(), key=lambda one: one.change.keys() == {EXPANDABLE}):
        if not taken & option.change.keys():
            taken |= option.change.keys()
            yield option


def least(job: Job) -> Least:
    graph = graph_of(job)
    found = []
    for rank in ranks_of(job, graph):
        peak, account = rank_peak(job, graph, rank)
        outside = outside_allocator(job.cluster, account.groups, eager=account.eager)
        high = interval(job, account, peak, outside).high_bytes
        found.append(Least(peak_bytes=peak, high_bytes=high, host_bytes=account.host_bytes * job.cluster.gpus_per_node))
    return max(found, key=lambda one: one.peak_bytes)


def seconds(job: Job) -> float | None:
    try:
        return step_time(job).step_s
    except UllageError:
        return None


def _words(change: Change) -> str:
    if change.keys() == {EXPANDABLE}:
        return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    return ", ".join(f"{key} = {show(value)}" for key, value in change.items())
