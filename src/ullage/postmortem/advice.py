"""What to change: each change estimated as a whole job, ranked by seconds lost for bytes freed, up to the first that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

from ullage.engines.changes import Change, changed, freeing, merged
from ullage.frozen import FrozenMap, frozen
from ullage.job.fields import show
from ullage.job.job import Job
from ullage.postmortem.needed import beyond_bytes, outside_step
from ullage.postmortem.option import Option
from ullage.postmortem.tried import (
    ANOTHER_RUN,
    EXPANDABLE,
    cut,
    learnt_otherwise,
    more_gpus,
    more_nodes,
    off_host,
    others,
    shorter,
)

if TYPE_CHECKING:
    from ullage.postmortem.why import Answer

Edit = Callable[[Change], str | None]
"""A change as a unified diff of a person's own file; None where it is not the file's to say."""

_GROW_WITH_SEQUENCES = ("activations", "logits", "attention-scores", "outlier-length", "padding-mask")
_MOST_TOGETHER = 4
_MOST_SHOWN = 8
_TO_THE_HOST = "offload."


@frozen
class Advice:
    """change: dotted job keys. frees_bytes: of the card at the peak, or of its tensors where they alone pass the card, before or after;
    slowdown_ratio: the step's time after over before (None: not known); low_bytes..high_bytes: the estimate after it, with what the run
    needed beyond its account (None: the tensors alone pass the card, or the states the host). host_bytes: of a node's own memory after it,
    where states are on the host, and frees_host_bytes less than before. verdict_after: of the card, and of the host
    where its memory is known."""

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


class Search:
    """Changes of one job, against what an answer says of it. edit: see Edit; None where the job came from no file of a person's own."""

    def __init__(self, job: Job, edit: Edit | None, answer: Answer) -> None:
        self.job = job
        self.edit = edit
        self.numbers = answer.evidence.numbers
        self.before = Option({}, job)
        self.beyond_bytes = beyond_bytes(answer, self.before)
        self.of_sequences = any(one.kind in _GROW_WITH_SEQUENCES for one in answer.causes[:2])
        self.helpless = outside_step(answer.causes) and self.before.verdict != "oom"
        self.seconds = self.before.seconds
        self.peak_bytes = self.before.peak_bytes

    def found(self) -> Iterator[Advice]:
        """Single changes by rank, up to the first that fits; where none does, they are put together until they do.

        None of a step that fits, where something else ran out. Beside states on the host stand more GPUs.
        """
        if self.helpless:
            return
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
                if any(key.startswith(_TO_THE_HOST) for key in option.change):
                    yield from self._more_gpus()
                return
        if shown > 1:
            yield from self._together(options)

    def _more_gpus(self) -> Iterator[Advice]:
        """Twice as many, told beside what waits on the host, which costs most of all that fits: who has them would rather take them."""
        for change in more_gpus(self.job):
            other = changed(self.job, change)
            if other is not None:
                option = Option(change, other, self.beyond_bytes)
                if self._helps(option):
                    yield self._advice(option)
                return

    def on_host(self) -> Iterator[Advice]:
        """What leaves a node more of its own memory, by seconds lost for its bytes, then more nodes, up to the first that fits."""
        before = self.before.host_bytes
        here = sorted(self._off_host(off_host(self.job)), key=lambda one: self._lost(one) / (before - one.host_bytes))
        for option in chain(here, self._off_host(more_nodes(self.job))):
            yield self._advice(option)
            if option.verdict == "fits" and self.job.cluster.host_memory_bytes is not None:
                return

    def _off_host(self, changes: Iterable[Change]) -> Iterator[Option]:
        for change in changes:
            other = changed(self.job, change)
            if other is None:
                continue
            option = Option(change, other)
            if option.least is not None and option.host_bytes < self.before.host_bytes:
                yield option

    def _ranked(self) -> Iterator[Option]:
        """What loses no time, then by seconds lost for each byte freed, then other work and other machines.

        The first and the last are looked at one by one: an earlier one may be the last that is needed.
        """
        job = self.job
        sequences = cut(job) if self.of_sequences else ()
        changes = (*others(job), *freeing(job), *shorter(job), *more_gpus(job), *sequences, *learnt_otherwise(job))
        options = [
            Option(change, other, self.beyond_bytes)
            for change in changes
            if (other := changed(job, change)) is not None
        ]
        free = [option for option in options if not self._lost(option)]
        slower = [option for option in options if 0 < self._lost(option) < inf]
        last = [option for option in options if self._lost(option) == inf]
        yield from filter(self._helps, free)
        yield from self._by_cost(slower)
        yield from filter(self._helps, last)

    def _by_cost(self, options: list[Option]) -> Iterator[Option]:
        """By seconds lost for each byte freed. None frees more than all there is: whose bound is too high is not looked at."""
        queue = [(self._lost(option) / self.peak_bytes, number, False) for number, option in enumerate(options)]
        heapify(queue)
        while queue:
            _, number, known = heappop(queue)
            option = options[number]
            if known:
                yield option
            elif self._helps(option):
                heappush(queue, (self._cost(option), number, True))

    def _helps(self, option: Option) -> bool:
        if option.least is None or option.on_host > 1:
            return False
        return option.peak_bytes < self.peak_bytes or (EXPANDABLE in option.change and self.may_be_in_pieces)

    @property
    def may_be_in_pieces(self) -> bool:
        """False where the run itself told that what was reserved, free and unused could not have held what was tried."""
        numbers = self.numbers
        free, tried = numbers.sane(numbers.free_bytes), numbers.tried_bytes
        if free is None or tried is None or numbers.reserved_bytes is None:
            return True
        return numbers.unused_bytes + free >= tried

    def _lost(self, option: Option) -> float:
        """Seconds of a step; of another run none are comparable."""
        if any(key in option.change for key in ANOTHER_RUN):
            return inf
        if option.seconds is None or self.seconds is None:
            return 0.0
        return max(0.0, option.seconds - self.seconds)

    def _cost(self, option: Option) -> float:
        return self._lost(option) / max(1, self.peak_bytes - option.peak_bytes)

    def _advice(self, option: Option) -> Advice:
        ratio = option.seconds / self.seconds if option.seconds is not None and self.seconds else None
        freed = self.peak_bytes - option.peak_bytes
        if self.before.after is not None and option.after is not None:
            freed = self.before.after.peak.device_bytes - option.after.peak.device_bytes
        return Advice(
            change=FrozenMap(option.change),
            what=_words(option.change),
            frees_bytes=freed,
            slowdown_ratio=ratio,
            verdict_after=option.verdict,
            low_bytes=option.bracket[0] if option.bracket is not None else None,
            high_bytes=option.bracket[1] if option.bracket is not None else None,
            edit=self.edit(option.change) if self.edit is not None else None,
            host_bytes=option.host_bytes,
            frees_host_bytes=self.before.host_bytes - option.host_bytes,
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
        return None if job is None else Option(change, job, self.beyond_bytes)

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


def _words(change: Change) -> str:
    if change.keys() == {EXPANDABLE}:
        return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    return ", ".join(f"{key} = {show(value)}" for key, value in change.items())
