"""What to change: each change estimated as a whole job, ranked by seconds lost for bytes freed, up to the first that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ullage.engines.changes import Change, changed, freeing
from ullage.engines.estimate import Estimate, estimate, rank_peak
from ullage.engines.registry import ranks_of
from ullage.errors import UllageError
from ullage.frozen import FrozenMap, frozen
from ullage.job.adapted import graph_of
from ullage.job.fields import show
from ullage.job.job import Job
from ullage.postmortem.causes import Cause
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.useless import Useless, useless
from ullage.postmortem.why import Answer
from ullage.postmortem.with_job import REPLICAS
from ullage.timing.step import step_time

Edit = Callable[[Change], str | None]
"""A change as a unified diff of a person's own file; None where it is not the file's to say."""

_MOST_TOGETHER = 4
_MOST_SHOWN = 6
_EXPANDABLE = "engine.options.expandable_segments"
_LOSSES = ("fused-linear", "chunked", "vocab-parallel-fused")


@frozen
class Advice:
    """change: dotted job keys. frees_bytes: of the card at the peak; slowdown_ratio: the step's time after over before (None: not
    known); low_bytes..high_bytes: the estimate after it (None: the tensors alone pass the card)."""

    change: FrozenMap
    what: str
    frees_bytes: int
    slowdown_ratio: float | None
    verdict_after: str
    low_bytes: int | None = None
    high_bytes: int | None = None
    edit: str | None = None


@frozen
class Why:
    """What ``ullage why`` answers. useless: what is often tried and does not help here, with the reason."""

    evidence: Evidence
    causes: tuple[Cause, ...]
    answer: Answer
    advice: tuple[Advice, ...]
    useless: tuple[Useless, ...]


def advised(answer: Answer, edit: Edit | None = None) -> Why:
    """The answer with what helps. Without a job, or for one that no account models, there is no advice to estimate."""
    host = answer.evidence.recognised == "host-oom"
    known = answer.job is not None and answer.unmodelled is None and answer.evidence.recognised != "not-oom"
    found = tuple(_Search(answer.job, edit).found()) if known and not host and answer.job is not None else ()
    return Why(
        evidence=answer.evidence,
        causes=answer.causes,
        answer=answer,
        advice=found,
        useless=useless(answer.evidence, answer.causes),
    )


@frozen
class _Option:
    change: FrozenMap
    job: Job
    peak_bytes: int
    seconds: float | None
    order: int


class _Search:
    def __init__(self, job: Job, edit: Edit | None) -> None:
        self.job = job
        self.edit = edit
        self.before = estimate(job)
        self.seconds = _seconds(job)
        self.peak_bytes = _peak_bytes(job)

    def found(self) -> Iterator[Advice]:
        """Single changes by rank, up to the first that fits; where none does, they are put together until they do."""
        options = sorted(self._options(), key=self._cost)
        shown = 0
        for option in options[:_MOST_SHOWN]:
            advice = self._advice(option)
            if advice.frees_bytes <= 0:
                continue
            shown += 1
            yield advice
            if advice.verdict_after == "fits":
                return
        if shown > 1:
            yield from self._together(options)

    def _options(self) -> Iterator[_Option]:
        for order, change in enumerate((*_others(self.job), *freeing(self.job), *_shorter(self.job))):
            option = self._option(change, order)
            if option is not None and (option.peak_bytes < self.peak_bytes or _EXPANDABLE in change):
                yield option

    def _option(self, change: Change, order: int) -> _Option | None:
        job = changed(self.job, change)
        if job is None:
            return None
        try:
            peak = _peak_bytes(job)
        except UllageError:
            return None
        return _Option(change=FrozenMap(change), job=job, peak_bytes=peak, seconds=_seconds(job), order=order)

    def _cost(self, option: _Option) -> tuple[bool, float, int]:
        """Seconds lost for each byte freed; a change of the work itself comes last."""
        freed = max(1, self.peak_bytes - option.peak_bytes)
        lost = 0.0
        if option.seconds is not None and self.seconds is not None:
            lost = max(0.0, option.seconds - self.seconds)
        return "data.seq_len" in option.change, lost / freed, option.order

    def _advice(self, option: _Option) -> Advice:
        after = self._after(option)
        peak = after.peak if after is not None else None
        ratio = option.seconds / self.seconds if option.seconds is not None and self.seconds else None
        change = option.change.as_dict()
        freed = (
            self.before.peak.device_bytes - peak.device_bytes
            if peak is not None
            else self.peak_bytes - option.peak_bytes
        )
        return Advice(
            change=option.change,
            what=_words(change),
            frees_bytes=freed,
            slowdown_ratio=ratio,
            verdict_after=after.verdict if after is not None else "oom",
            low_bytes=peak.low_bytes if peak is not None else None,
            high_bytes=peak.high_bytes if peak is not None else None,
            edit=self.edit(change) if self.edit is not None else None,
        )

    def _after(self, option: _Option) -> Estimate | None:
        """None where the tensors alone pass the card, so that its allocator need not be played."""
        if option.peak_bytes > option.job.cluster.device.capacity_bytes:
            return None
        return estimate(option.job)

    def _together(self, options: list[_Option]) -> Iterator[Advice]:
        change: Change = {}
        count = 0
        for option in options:
            more = option.change.as_dict()
            if change.keys() & more.keys():
                continue
            change |= more
            count += 1
            both = self._option(change, 0) if count > 1 else None
            if both is None:
                continue
            advice = self._advice(both)
            if advice.verdict_after == "fits" or count == _MOST_TOGETHER:
                yield advice
                return


def _others(job: Job) -> Iterator[Change]:
    """What costs nothing or little, before what ``freeing`` knows; and shards in place of replicas, which is another engine."""
    if not job.engine.options.get("expandable_segments"):
        yield {_EXPANDABLE: True}
    if job.attention in ("eager", "math"):
        yield {"attention": "flash"}
    for loss in _LOSSES:
        if job.loss.kind == "full":
            yield {"loss": loss}
    if job.engine.name in REPLICAS and job.layout.dp > 1:
        mixed = f"{job.precision.compute}-mixed" if job.precision.autocast else None
        yield {"engine.name": "fsdp2", "engine.zero_stage": 3} | ({"precision": mixed} if mixed else {})


def _shorter(job: Job) -> Iterator[Change]:
    if job.data.seq_len % 2 == 0:
        yield {"data.seq_len": job.data.seq_len // 2}


def _peak_bytes(job: Job) -> int:
    graph = graph_of(job)
    return max(rank_peak(job, graph, rank)[0] for rank in ranks_of(job, graph))


def _seconds(job: Job) -> float | None:
    try:
        return step_time(job).step_s
    except UllageError:
        return None


def _words(change: Change) -> str:
    if change.keys() == {_EXPANDABLE}:
        return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    return ", ".join(f"{key} = {show(value)}" for key, value in change.items())
