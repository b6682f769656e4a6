"""A lower bound of a pipeline whose cut is not known: its ranks share time and memory, and what one lacks another must have.

Of each rank some sums over its layers are no more than the step and the device allow: seconds of computing, seconds on the wire, bytes,
and seconds of computing where what has no room is computed again. Ranks together hold all layers. Whichever sum is taken of each rank,
added up they say how long the step is at the least: weak duality of the linear program that cuts layers into any fractions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf

from ullage.frozen import frozen, replace
from ullage.job.job import Engine, Job
from ullage.planner.bounds import wire_bound_s
from ullage.planner.costs import GridCosts
from ullage.planner.knapsack import Chosen
from ullage.planner.shapes import ShapeCosts
from ullage.planner.space import FULL, NONE, Family
from ullage.planner.states import BytesPerElement, EachElement, each_element
from ullage.timing.machine import exchange_cost
from ullage.timing.states import is_sharded, reductions, replica_reductions, resident

_ROUNDS = 3
"""Of Newton's method at most: what each round finds is a bound."""

_NEAR = 1 - 1e-9
_FOREVER = 1e30


@frozen
class Pipe:
    """A pipeline: its ranks, the micro-batches of a step, seconds from one rank to the next."""

    ranks: int
    micro_batches: int
    send_s: float


@frozen
class Kept:
    """The least that any engine of a class keeps. states_bytes: between two steps, of all ranks together."""

    dense: BytesPerElement
    experts: BytesPerElement
    frozen: BytesPerElement
    states_bytes: float

    @property
    def each(self) -> EachElement:
        return self.dense, self.experts, self.frozen


@frozen
class Least:
    """The least that any engine of a class keeps and sends; seconds are of one micro-batch.

    wire_s: of each kind of block, its parameters and gradients; of a mean layer, of what is before layers, of what is behind.
    exchanged_s: by replicas, of the rank that sends most.
    """

    kept: Kept
    wire_s: Sequence[float]
    mean_wire_s: float
    first_wire_s: float
    last_wire_s: float
    exchanged_s: float

    def sent_s(self, grid: GridCosts, pipe: Pipe) -> float:
        """Of all micro-batches, whatever is computed: some rank sends no less than the mean."""
        wire_s = self.mean_wire_s * grid.graph.layers + self.first_wire_s + self.last_wire_s
        return pipe.micro_batches * max(self.exchanged_s, wire_s / pipe.ranks)


def alike(job: Job) -> tuple[bool, bool]:
    """Engines' stages that one bound serves: those that send the same."""
    return is_sharded(job), reductions(job) > 1


def kept_of(grid: GridCosts, job: Job, engines: Sequence[Engine]) -> Kept:
    """job: a pipeline; engines: of it, alike. How many sequences it has at a time does not matter."""
    return grid.known(("kept", *_divided(job, engines)), lambda: _kept_of(grid, _with_each(job, engines)))


def least_of(grid: GridCosts, job: Job, engines: Sequence[Engine]) -> Least:
    """Likewise, with what is sent, which takes longer to tell."""
    return grid.known(
        ("sent", *_divided(job, engines)),
        lambda: _least_of(grid, kept_of(grid, job, engines), _with_each(job, engines)),
    )


def _divided(job: Job, engines: Sequence[Engine]) -> tuple[object, ...]:
    layout = job.layout
    return layout.dp, layout.pp, job.data.grad_accum > 1, tuple([(one.zero_stage, one.shard_group) for one in engines])


def _with_each(job: Job, engines: Sequence[Engine]) -> list[Job]:
    return [replace(job, engine=one) for one in engines]


def _kept_of(grid: GridCosts, jobs: Sequence[Job]) -> Kept:
    dense, experts, frozen = (
        BytesPerElement(kept=min(one.kept for one in kind), end=min(one.end for one in kind))
        for kind in zip(*map(each_element, jobs), strict=True)
    )
    numel = [sum(times * grid.numels[kind][of] for kind, times, _ in grid.runs) for of in (0, 1, 2)]
    if jobs[0].layout.pp == 1:
        numel = [all_of - twice for all_of, twice in zip(numel, grid.tied, strict=True)]
    states_bytes = numel[0] * dense.kept + numel[1] * experts.kept + numel[2] * frozen.kept
    return Kept(dense=dense, experts=experts, frozen=frozen, states_bytes=states_bytes)


def _least_of(grid: GridCosts, kept: Kept, jobs: Sequence[Job]) -> Least:
    sharded, reduces_each = alike(jobs[0])
    gathered = sharded and not resident(jobs[0])
    wires = [wire_bound_s(grid, job) for job in jobs] if gathered else [[0.0] * len(grid.kinds)]
    exchanged_s = 0.0
    if not sharded and reduces_each:
        exchanged_s = min(_exchanged_s(grid, job) for job in jobs)
    wire_s = [min(of_kind) for of_kind in zip(*wires, strict=True)]
    sums = {"layer": 0.0, "embedding": 0.0, "": 0.0}
    for kind, times, role in grid.runs:
        sums[role if role in sums else ""] += times * wire_s[kind]
    return Least(
        kept=kept,
        wire_s=wire_s,
        mean_wire_s=sums["layer"] / grid.graph.layers,
        first_wire_s=sums["embedding"],
        last_wire_s=sums[""],
        exchanged_s=exchanged_s,
    )


@frozen
class Mean:
    """What a rank has of a model on average: some rank has no less."""

    dense: int
    experts: int

    def numel(self, *, expert: bool) -> int:
        return self.experts if expert else self.dense


def _exchanged_s(grid: GridCosts, job: Job) -> float:
    """The longest of a rank's exchanges of gradients, which hides behind no more than one pass."""
    numels = [(times, grid.numels[kind]) for kind, times, _ in grid.runs]
    dense = sum(times * dense for times, (dense, _, _) in numels)
    experts = sum(times * experts for times, (_, experts, _) in numels)
    mean = Mean(dense=(dense - grid.tied[0]) // job.layout.pp, experts=experts // job.layout.pp)
    return max((exchange_cost(job, one).seconds for one in replica_reductions(job, mean)), default=0.0)


@dataclass(slots=True)
class Share:
    """What a rank has of some blocks. kept, smallest: bytes that a forward leaves, as a family's first and its last recomputation does."""

    compute_s: float = 0.0
    kept: float = 0.0
    smallest: float = 0.0
    dense: float = 0.0
    experts: float = 0.0
    frozen_bytes: float = 0.0
    wire_s: float = 0.0
    states: float = 0.0
    end: float = 0.0

    def add(self, other: Share, times: float) -> None:
        self.compute_s += times * other.compute_s
        self.kept += times * other.kept
        self.smallest += times * other.smallest
        self.dense += times * other.dense
        self.experts += times * other.experts
        self.frozen_bytes += times * other.frozen_bytes

    def sums(self) -> tuple[float, ...]:
        return self.compute_s, self.wire_s, self.states, self.end, self.kept, self.smallest

    def sum_of(self, chosen: str, flights: int, again: float, saved_s: float) -> float:
        """One of the sums that ``Balance`` adds up. again, saved_s: of a line of ``_again``, for a byte that is held."""
        if chosen == "compute":
            return self.compute_s
        if chosen == "kept":
            return self.states + flights * self.smallest
        if chosen == "end":
            return self.end
        if chosen == "wire":
            return self.wire_s
        return self.compute_s - saved_s + again * (self.states + flights * self.kept)

    def under(self, each: Kept, wire_s: float) -> None:
        """With its states, and what is sent of it."""
        frozen = self.frozen_bytes * each.frozen.kept
        self.states = self.dense * each.dense.kept + self.experts * each.experts.kept + frozen
        self.end = self.dense * each.dense.end + self.experts * each.experts.end + frozen
        self.wire_s = wire_s


@frozen
class Again:
    """A line below what a layer is recomputed for: whatever of it runs again, its seconds and ``s_per_byte`` for each byte that it then
    keeps are no less than that for the bytes that it keeps plain, less ``saved_s``, by run of layers. mean_s: of a mean layer."""

    s_per_byte: float
    saved_s: tuple[float, ...]
    mean_s: float


def _again(costs: ShapeCosts, family: Family) -> list[Again]:
    """Of layers one by one, the seconds of a byte in the kind that gets most for them; of sets of modules each slope of the convex hull of
    what one kind's keep and take, to which every other kind has its own saving."""
    runs = [(kind, times) for kind, times, role in costs.grid.runs if role == "layer"]
    if family.layered:
        plain, full = costs.kept(NONE), costs.kept(FULL)
        rates = [costs.again_s(kind, FULL) / (plain[kind] - full[kind]) for kind, _ in runs if plain[kind] > full[kind]]
        return [Again(s_per_byte=min(rates), saved_s=(0.0,) * len(runs), mean_s=0.0)] if rates else []
    if not family.modular:
        return []
    layers = costs.grid.groups.layers
    most = layers.index(max(runs, key=lambda one: one[1])[0])
    count = sum(times for _, times in runs)
    found = []
    for rate in sorted({slope for some in costs.groups for slope in _slopes(some, most)}):
        saved_s = tuple(
            -sum(min([one.again_s[at] + rate * one.left_bytes[at] for one in some]) for some in costs.groups)
            for kind, _ in runs
            for at in (layers.index(kind),)
        )
        mean_s = sum(times * saved for (_, times), saved in zip(runs, saved_s, strict=True)) / count
        found.append(Again(s_per_byte=rate, saved_s=saved_s, mean_s=mean_s))
    return found


def _slopes(sets: Sequence[Chosen], kind: int) -> Iterator[float]:
    """Seconds for a byte along the lower hull of a group's sets, from the one that recomputes nothing to the one that keeps least."""
    at_bytes, at_s = 0, 0.0
    while True:
        steps = [
            ((one.again_s[kind] - at_s) / (at_bytes - one.left_bytes[kind]), one.left_bytes[kind], one.again_s[kind])
            for one in sets
            if one.left_bytes[kind] < at_bytes
        ]
        if not steps:
            return
        slope, at_bytes, at_s = min(steps)
        yield slope


class Balance:
    """The blocks of a shape under a family of recomputations, whatever its pipeline."""

    def __init__(self, costs: ShapeCosts, family: Family) -> None:
        self.costs, self._family = costs, family
        self.count = costs.grid.graph.layers
        self.mean, self.first, self.last = Share(), Share(), Share()
        self.layers: list[tuple[int, int, Share]] = []
        self._smallest = costs.smallest if family.modular else costs.kept(family.kinds[-1])
        for kind, times, role in costs.grid.runs:
            one = self._share(kind, family)
            if role == "layer":
                self.layers.append((kind, times, one))
                self.mean.add(one, times / self.count)
            else:
                (self.first if role == "embedding" else self.last).add(one, times)
        self._no_saving = (0.0,) * len(self.layers)

    @cached_property
    def again(self) -> list[Again]:
        return _again(self.costs, self._family)

    def _share(self, kind: int, family: Family) -> Share:
        costs = self.costs
        cost, layer = costs.blocks[kind], costs.is_layer[kind]
        fastest = family.fastest if layer else NONE
        return Share(
            compute_s=cost.both_s + costs.again_s(kind, fastest),
            kept=costs.kept(fastest)[kind],
            smallest=self._smallest[kind],
            dense=cost.dense,
            experts=cost.experts,
            frozen_bytes=cost.frozen_bytes,
        )

    def seconds(self, pipe: Pipe, least: Least, room: float, at_least: float) -> float | None:
        """Of all micro-batches, no less than ``at_least``; None: no cut has room. room: bytes."""
        mean, first, last, each = self.mean, self.first, self.last, least.kept
        for kind, _, one in self.layers:
            one.under(each, least.wire_s[kind])
        mean.under(each, least.mean_wire_s)
        first.under(each, least.first_wire_s)
        last.under(each, least.last_wire_s)
        if pipe.ranks == 1:
            dense, _, frozen_bytes = self.costs.grid.tied
            first.states -= dense * each.dense.kept + frozen_bytes * each.frozen.kept
            first.end -= dense * each.dense.end + frozen_bytes * each.frozen.end
        states = self.count * mean.states + first.states + last.states
        sent = self.costs.sent_bytes if pipe.ranks > 1 else 0
        if states + self.count * mean.smallest - pipe.ranks * sent > pipe.ranks * room:
            return None
        if self._has_room(pipe, room, at_least):
            return at_least
        if self._ends_bytes(pipe) > room:
            return None
        held, _, needed = self._added_up(pipe, room, _FOREVER, ())
        if held < needed * _NEAR:
            return None
        for _ in range(_ROUNDS):
            held, gained, needed = self._added_up(pipe, room, at_least, self.again)
            if held + gained * at_least >= needed * _NEAR or not gained:
                break
            at_least = max(at_least, (needed - held) / gained)
        return at_least

    def _ends_bytes(self, pipe: Pipe) -> float:
        """What the first or the last rank holds, whichever is more, with one layer beside its own."""
        flights = min(pipe.ranks, pipe.micro_batches)
        sent = self.costs.sent_bytes if pipe.ranks > 1 else 0
        return max(
            end.states
            + many * (end.smallest - sent)
            + min([one.states + many * one.smallest for _, _, one in self.layers])
            for end, many in ((self.first, flights), (self.last, 1))
        )

    def _has_room(self, pipe: Pipe, room: float, seconds: float) -> bool:
        """Whether ranks that compute for so long need not recompute: those that have most in flight, and the last."""
        mean = self.mean
        for end, flights in ((self.first, min(pipe.ranks, pipe.micro_batches)), (self.last, 1)):
            layers = min(self.count, (seconds / pipe.micro_batches - end.compute_s) / mean.compute_s)
            held = end.states + flights * end.kept + layers * (mean.states + flights * mean.kept)
            if held > room or end.end + layers * mean.end > room:
                return False
        return True

    def _added_up(self, pipe: Pipe, room: float, seconds: float, lines: Sequence[Again]) -> tuple[float, float, float]:
        """Of each rank the sum that leaves it fewest mean layers in so many seconds, added up: mean layers that are held in no time, how
        many more in each second, and how many all layers are at the least. lines: of what is computed again, where time is short."""
        costs, each = self.costs, 1 / pipe.micro_batches
        first, last, layers = self.first, self.last, self.layers
        sent = costs.sent_bytes if pipe.ranks > 1 else 0
        compute_s, sent_s, states, end, kept, smallest = self.mean.sums()
        held = gained = 0.0
        shares = [inf] * len(layers)
        for ranks, rank, flights in _groups(pipe.ranks, pipe.micro_batches):
            free_s = -(rank * (costs.shortest_s + 2 * pipe.send_s) + (costs.first_s if rank else 0.0)) * each
            wire_s, at_end = free_s, room
            plain = least = room + flights * sent  # what a forward sends on may be gone (bounds.py, in_flight_bytes)
            if not rank:
                free_s -= first.compute_s
                wire_s -= first.wire_s
                plain -= first.states + flights * first.kept
                least -= first.states + flights * first.smallest
                at_end -= first.end
            if rank == pipe.ranks - 1:
                free_s -= last.compute_s
                wire_s -= last.wire_s
                plain -= last.states + flights * last.kept
                least -= last.states + flights * last.smallest
                at_end -= last.end
            # computing; what is kept at the least; states at the end; the wire; computing again what has no room
            chosen, of_mean, limit, slope = "compute", compute_s, free_s, each
            fewest = (free_s + each * seconds) / compute_s
            own = states + flights * smallest
            if least < fewest * own:
                chosen, of_mean, limit, slope, fewest = "kept", own, least, 0.0, least / own
            if end and at_end < fewest * end:
                chosen, of_mean, limit, slope, fewest = "end", end, at_end, 0.0, at_end / end
            if sent_s and wire_s + each * seconds < fewest * sent_s:
                chosen, of_mean, limit, slope = "wire", sent_s, wire_s, each
                fewest = (wire_s + each * seconds) / sent_s
            again, saved_s = 0.0, self._no_saving
            for line in lines:
                rate = line.s_per_byte / flights
                own = compute_s - line.mean_s + rate * (states + flights * kept)
                if free_s + rate * plain + each * seconds < fewest * own:
                    chosen, of_mean, limit, slope = "again", own, free_s + rate * plain, each
                    fewest, again, saved_s = (limit + each * seconds) / own, rate, line.saved_s
            held += ranks * limit / of_mean
            gained += ranks * slope / of_mean
            if len(layers) > 1:
                shares = [
                    min(share, one.sum_of(chosen, flights, again, saved_s[at]) / of_mean)
                    for at, (share, (_, _, one)) in enumerate(zip(shares, layers, strict=True))
                ]
        if len(layers) == 1:
            return held, gained, self.count
        return held, gained, sum(times * share for (_, times, _), share in zip(layers, shares, strict=True))


_GROUPS = 4


@lru_cache(maxsize=4096)
def _groups(ranks: int, micro_batches: int) -> tuple[tuple[int, int, int], ...]:
    """Ranks that are taken together, as if each started with the first of them and had in flight what the last has: how many, the first,
    micro-batches in flight. The first and the last rank are by themselves."""
    inner = range(1, ranks - 1)
    size = -(-len(inner) // _GROUPS) or 1
    starts = list(inner[::size])
    found = (
        [(1, 0)] + [(min(size, ranks - 1 - start), start) for start in starts] + ([(1, ranks - 1)] if ranks > 1 else [])
    )
    return tuple((many, start, min(ranks - start - many + 1, micro_batches)) for many, start in found)
