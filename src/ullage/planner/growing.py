"""Seconds of a block's work as it grows with the micro-batch: of any number of sequences, from the work of one and of two.

Ops and tensors grow evenly, but for copies that one sequence does not need. Seconds of what moves through memory then do too; those of
matmuls, attention and exchanges are looked up for what comes out, whose efficiency does not grow evenly. A search asks for all
micro-batches that a grid may have, so that all of them are looked up in one go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cached_property, lru_cache

from ullage.comm.group import Group
from ullage.frozen import replace
from ullage.hardware.cluster import Cluster, Device
from ullage.hardware.curve import Kind
from ullage.hardware.measured import Direction
from ullage.timing.blocks import Place, covers, waited_s
from ullage.timing.machine import attention_s, axis_group, called, multiplied_s, traffic_s
from ullage.timing.work import Attention, Exchange, Matmul, Pass, Traffic

Pair = tuple[Pass, Pass]

Sizes = tuple[int, ...]
"""Micro-batches."""

_Sizes = tuple[int, int, int, int]


class Growing:
    """One direction of a block as it grows with the micro-batch: what is looked up, and what is linear.

    beside: the same block under other expert parallelism, of which the passes that are the same are looked up once. looked_up: what the
    grid's other blocks have looked up. sizes: the micro-batches that may be asked for, all of which the first one's answer brings.
    """

    def __init__(
        self,
        pairs: list[Pair],
        place: Place,
        looked_up: LookedUp,
        *,
        backward: bool,
        beside: Growing | None = None,
        sizes: Sizes = (),
    ) -> None:
        self._pairs, self._place, self._backward = pairs, place, backward
        self._sizes = sizes
        self._parts: dict[tuple[int, ...], Growing] = {}
        self._known: dict[int, float] = {}
        places = beside._places if beside is not None else {}
        own: list[Pair] = pairs
        same: tuple[int, ...] = ()
        if places:
            at = [places.get(pair) for pair in pairs]
            same = tuple([one for one in at if one is not None])
            own = [pair for pair, one in zip(pairs, at, strict=True) if one is None]
        self._shared = beside._part(same) if beside is not None and same else None
        self._looked_up = looked_up
        counted = Counter([pair for pair in own if pair[0].matmuls or pair[0].attention or pair[0].exchanges])
        self._passes = [(self._pass(pair), times) for pair, times in counted.items()]
        kernels = [both for one, two in own for both in zip(one.traffic, two.traffic, strict=True)]
        moved = [self._moved_s(both[at] for both in kernels if both[0].bytes) for at in (0, 1)]
        self._first_s, self._each_s = moved[0], moved[1] - moved[0]
        self._copied = [two for one, two in kernels if not one.bytes]  # of one sequence a view

    @cached_property
    def _places(self) -> dict[Pair, int]:
        """Where each pass is that is the same under any expert parallelism."""
        return {pair: at for at, pair in enumerate(self._pairs) if _knows_no_experts(pair)}

    def _part(self, places: tuple[int, ...]) -> Growing:
        """Only these passes."""
        if places not in self._parts:
            pairs = [self._pairs[at] for at in places]
            self._parts[places] = Growing(
                pairs, self._place, self._looked_up, backward=self._backward, sizes=self._sizes
            )
        return self._parts[places]

    def seconds(self, micro_batch: int) -> float:
        if micro_batch not in self._known:
            sizes = self._sizes if micro_batch in self._sizes else (micro_batch,)
            self._known.update(zip(sizes, self._seconds(sizes), strict=True))
        return self._known[micro_batch]

    def _seconds(self, sizes: Sizes) -> list[float]:
        found = [self._first_s + self._each_s * (size - 1) for size in sizes]
        if self._copied:
            found = [seconds + self._copied_s(size) for seconds, size in zip(found, sizes, strict=True)]
        if self._shared is not None:
            found = [seconds + self._shared.seconds(size) for seconds, size in zip(found, sizes, strict=True)]
        for one, times in self._passes:
            found = [seconds + times * more for seconds, more in zip(found, one.seconds(sizes), strict=True)]
        return found

    def _copied_s(self, micro_batch: int) -> float:
        if micro_batch == 1:
            return 0.0
        return self._moved_s(replace(one, bytes=one.bytes * micro_batch // 2) for one in self._copied)

    def _moved_s(self, traffic: Iterable[Traffic]) -> float:
        device = self._place.cluster.device
        return sum([traffic_s(device, one, backward=self._backward) for one in traffic])

    def _pass(self, pair: Pair) -> _GrowingPass:
        key = pair, self._backward and bool(pair[0].matmuls or pair[0].attention)
        if key not in self._looked_up:
            self._looked_up[key] = _GrowingPass(pair, self._place, backward=self._backward)
        return self._looked_up[key]


class _GrowingPass:
    """Seconds of what is looked up of a pass, by the micro-batch (timing/blocks.py, pass_s)."""

    def __init__(self, pair: Pair, place: Place, *, backward: bool) -> None:
        one, two = pair
        self._place, self._backward = place, backward
        device = place.cluster.device
        self._matmuls = [_Multiplied(device, a, b) for a, b in zip(one.matmuls, two.matmuls, strict=True)]
        self._attention = _Evenly(one.attention, two.attention) if one.attention and two.attention else None
        self._exchanges = [_Called(place, a, b) for a, b in zip(one.exchanges, two.exchanges, strict=True)]
        self._known: dict[Sizes, list[float]] = {}

    def seconds(self, sizes: Sizes) -> list[float]:
        if sizes not in self._known:
            self._known[sizes] = self._seconds(sizes)
        return self._known[sizes]

    def _seconds(self, sizes: Sizes) -> list[float]:
        matmuls = [one.seconds(sizes) for one in self._matmuls]
        attention = [self._attention_s(size) for size in sizes] if self._attention else [0.0] * len(sizes)
        each = list(zip(*matmuls, strict=True)) if matmuls else [()] * len(sizes)
        found = [sum(some) + seconds for some, seconds in zip(each, attention, strict=True)]
        if self._exchanges:
            cover = [
                covers(list(some), seconds, backward=self._backward)
                for some, seconds in zip(each, attention, strict=True)
            ]
            for one in self._exchanges:
                behind = one.exchange.behind
                found = [
                    seconds + waited_s(one.exchange, wire_s, hidden.get(behind, 0.0), self._place)
                    for seconds, wire_s, hidden in zip(found, one.seconds(sizes), cover, strict=True)
                ]
        return found

    def _attention_s(self, micro_batch: int) -> float:
        assert self._attention is not None
        work = self._attention.at(micro_batch - 1)
        return attention_s(self._place.cluster.device, work, self._place.attention, backward=self._backward)


class _Multiplied:
    """A matmul as it grows. Rows that do not come out even between experts are rounded down, so that two sequences may have one more than
    twice those of one: as many of them have half as many of those of two, rounded down, or more."""

    def __init__(self, device: Device, one: Matmul, two: Matmul) -> None:
        how = one.accumulate, one.streams, one.aligned, one.scales, one.cuda, one.direction
        self._known, self._ask = _multiplied(device, one.dtype, how)
        self._first = one.m, one.n, one.k, one.groups
        self._second = two.m, two.n, two.k, two.groups
        self._each = two.m - one.m, two.n - one.n, two.k - one.k, two.groups - one.groups
        self._uneven = any(second == 2 * first + 1 for first, second in zip(self._first, self._second, strict=True))

    def seconds(self, sizes: Sizes) -> list[float]:
        (m, n, k, groups), (more_m, more_n, more_k, more_groups) = self._first, self._each
        known, found = self._known, []
        for size in sizes:
            more = size - 1
            work = m + more_m * more, n + more_n * more, k + more_k * more, groups + more_groups * more
            if self._uneven:
                work = self._rounded_down(size, work)
            seconds = known.get(work)
            if seconds is None:
                seconds = known[work] = self._ask(*work)
            found.append(seconds)
        return found

    def _rounded_down(self, micro_batch: int, work: _Sizes) -> _Sizes:
        m, n, k, groups = (
            second * micro_batch // 2 if second == 2 * first + 1 else size
            for first, second, size in zip(self._first, self._second, work, strict=True)
        )
        return m, n, k, groups


class _Called:
    """An exchange as it grows."""

    def __init__(self, place: Place, one: Exchange, two: Exchange) -> None:
        group = axis_group(place.cluster, place.layout, one.axis)
        self.exchange = one
        self._known, self._ask = _called(place.cluster, group, one.kind, one.copies)
        self._first, self._each = one.payload_bytes, two.payload_bytes - one.payload_bytes

    def seconds(self, sizes: Sizes) -> list[float]:
        known, found = self._known, []
        for size in sizes:
            payload_bytes = self._first + self._each * (size - 1)
            seconds = known.get(payload_bytes)
            if seconds is None:
                seconds = known[payload_bytes] = self._ask(payload_bytes)
            found.append(seconds)
        return found


@lru_cache(maxsize=256)
def _multiplied(
    device: Device, dtype: str, how: tuple[bool, int, bool, bool, str, Direction]
) -> tuple[dict[_Sizes, float], Callable[[int, int, int, int], float]]:
    """Matmuls of one kind by their sizes: what is known of their seconds, shared by all grids, and what tells more."""
    return {}, lambda m, n, k, groups: multiplied_s(device, dtype, m, n, k, groups, *how)


@lru_cache(maxsize=1024)
def _called(cluster: Cluster, group: Group, kind: Kind, copies: int) -> tuple[dict[int, float], Callable[[int], float]]:
    """Exchanges of one kind by their bytes, likewise."""
    return {}, lambda payload_bytes: called(kind, payload_bytes, group, cluster, copies).seconds


def _knows_no_experts(pair: Pair) -> bool:
    """Whether what it sends goes where it goes under any expert parallelism."""
    return all(one.axis in ("tp", "cp") for work in pair for one in work.exchanges)


class _Evenly:
    """An attention, each number of it as far beyond the second as that is beyond the first."""

    def __init__(self, one: Attention, two: Attention) -> None:
        self._one = one
        pairs = ((field.name, getattr(one, field.name), getattr(two, field.name)) for field in fields(one))
        self._grows = [(name, first, second - first) for name, first, second in pairs if first != second]

    def at(self, more: int) -> Attention:
        """Of this many sequences beyond the first."""
        return replace(self._one, **{name: first + each * more for name, first, each in self._grows})


LookedUp = dict[tuple[Pair, bool], _GrowingPass]
"""Passes, in a backward or not: different blocks have the same."""
