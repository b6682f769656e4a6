"""Stage 3's parameter coordinator replayed: which parameters each module's hooks fetch, fetch ahead and release.

Source: runtime/zero/partitioned_param_coordinator.py (fetch_sub_module, release_sub_module, __params_to_release) and
partition_parameters.py (all_gather_coalesced, AllGatherCoalescedHandle), with a complete trace: from the third micro-step on.

Every module's hook fetches ahead, one of a module without parameters too: where modules are more than parameters (a transformers
layer has 13 for its 9) the prefetcher gains on the forward, however small its bucket, and enters the backward's part of the trace while
the forward still runs. What it passes over there because it is whole already stays whole, whatever max_reuse_distance says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as ListLike

from ullage.frozen import frozen


@frozen
class Hooks:
    """One module's call: the places of its own parameters. segment: the stretch of the step that it belongs to.

    forward: it is a forward, be it run again in a backward. releases: its end is seen.
    """

    params: tuple[int, ...]
    segment: int
    forward: bool = True
    releases: bool = True


@frozen
class Limits:
    """DeepSpeed's sizes, in elements: stage3_prefetch_bucket_size, stage3_max_live_parameters, stage3_max_reuse_distance."""

    prefetch: int
    max_live: int
    max_reuse_distance: int


@frozen
class Level:
    """The most elements during a segment. held: whole or on their way, and in a backward with flat buffers that modules after it wait
    for. peak: for a moment, with the flat buffer beside all that is copied out of it. released: elements of parameters that are let go
    of for the first time in the pass."""

    held: int
    peak: int
    released: int = 0


class _Gather:
    """Parameters gathered by one call: a single one where it will lie, several through a flat buffer that they are copied from.

    The flat buffer goes when the last of them has been waited for.
    """

    def __init__(self, params: ListLike[int], numel: int) -> None:
        self.not_waited_for = set(params)
        self.numel = numel
        self.flat = len(params) > 1
        self.copied = False


class Coordinator:
    """numels: elements of each parameter; persistent: those that are never released."""

    def __init__(
        self, numels: tuple[int, ...], persistent: frozenset[int], hooks: ListLike[Hooks], limits: Limits
    ) -> None:
        self.numels = numels
        self.persistent = persistent
        self.hooks = hooks
        self.limits = limits
        self.queue = deque((param, step) for step, hook in enumerate(hooks) for param in sorted(hook.params))
        self.uses: dict[int, list[int]] = {}
        for param, step in self.queue:
            self.uses.setdefault(param, []).append(step)
        self.before = [0]  # elements of all parameters of the hooks before each one
        for hook in hooks:
            self.before.append(self.before[-1] + sum(numels[param] for param in hook.params))
        self.step = 0
        self.passed: dict[int, int] = {}  # the last use of each parameter that the queue is beyond
        self.whole: set[int] = set(persistent)
        self.released: set[int] = set()
        self.gathers: dict[int, _Gather] = {}
        self.counted = 0  # what DeepSpeed counts as available
        self.live = 0  # elements of what is whole or on its way
        self.flat = 0  # elements of flat buffers whose parameters have been copied out

    def levels(self, segments: int) -> list[Level]:
        """Of each segment (persistent parameters aside)."""
        found = [Level(held=0, peak=0)] * segments
        for hook in self.hooks:
            level = self._called(hook)
            before = found[hook.segment]
            found[hook.segment] = Level(
                held=max(before.held, level.held),
                peak=max(before.peak, level.peak),
                released=before.released + level.released,
            )
        return found

    def _called(self, hook: Hooks) -> Level:
        self._fetch(hook.params)
        peak = max([self.live + self.flat, *(self._wait(param) for param in hook.params)])
        self._take_from_queue(hook.params)
        self._fetch(self._ahead())
        held = self.live + (0 if hook.forward else self.flat)
        self.step += 1
        released = sum(self._release(param) for param in hook.params) if hook.releases else 0
        return Level(held=held, peak=max(held, peak), released=released)

    def _fetch(self, params: ListLike[int]) -> None:
        missing = [param for param in params if param not in self.whole]
        numel = sum(self.numels[param] for param in missing)
        gather = _Gather(missing, numel)
        for param in missing:
            self.whole.add(param)
            self.gathers[param] = gather
        self.counted += numel
        self.live += numel

    def _wait(self, param: int) -> int:
        """Returns the highest level on the way."""
        gather = self.gathers.pop(param, None)
        if gather is None or not gather.flat:
            return 0
        if not gather.copied:
            gather.copied = True
            self.flat += gather.numel
        level = self.live + self.flat
        gather.not_waited_for.discard(param)
        if not gather.not_waited_for:
            self.flat -= gather.numel
        return level

    def _take_from_queue(self, params: ListLike[int]) -> None:
        """Off the queue with what this module needs and no prefetch has taken."""
        expected = {param for param in params if self.passed.get(param, -1) < self.step}
        taken: set[int] = set()
        while self.queue and len(taken) < len(expected):
            param, step = self.queue.popleft()
            self.passed[param] = step
            taken.add(param)

    def _ahead(self) -> list[int]:
        room = min(self.limits.max_live - self.counted, self.limits.prefetch)
        chosen: list[int] = []
        numel = 0
        while self.queue and numel < room:
            param, step = self.queue.popleft()
            self.passed[param] = max(self.passed.get(param, -1), step)
            if param not in self.whole and param not in chosen:
                chosen.append(param)
                numel += self.numels[param]
        return chosen

    def _release(self, param: int) -> int:
        """Returns its elements, the first time."""
        skipped = self.passed.get(param, -1) > self.step
        if param in self.persistent or param not in self.whole or skipped or self._is_needed_soon(param):
            return 0
        numel = self.numels[param]
        self.whole.discard(param)
        self.counted -= numel
        self.live -= numel
        first = param not in self.released
        self.released.add(param)
        return numel if first else 0

    def _is_needed_soon(self, param: int) -> bool:
        uses = self.uses[param]
        at = bisect_left(uses, self.step)
        return at < len(uses) and self.before[uses[at]] - self.before[self.step] < self.limits.max_reuse_distance
