"""What is said of a pipeline before it is cut, and of blocks on two streams, against exact accounts of random ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from tests.planner.following import followed, following
from tests.planner.test_bounds import CASES, MANY, SLACK, space

from ullage.engines.estimate import rank_peak
from ullage.engines.registry import ranks_of
from ullage.planner.balance import Balance, Pipe, least_of
from ullage.planner.bounds import (
    StageTime,
    any_chunks_bound_s,
    evenly_bound_s,
    one_chunk_bound_s,
    piped_s,
    step_bound_s,
)
from ullage.timing.overlap import Wrapped, backward_s, forward_s
from ullage.timing.step import step_time


@pytest.mark.parametrize(("name", "engine"), CASES)
@pytest.mark.parametrize("smaller", [1.0, 0.5, 0.25], ids=["whole room", "half", "quarter"])
def test_what_ranks_share_is_no_more_than_a_strategy_that_fits_takes(name: str, engine: str, smaller: float) -> None:
    """On devices with less room too, on which balancing has more to say."""
    search = following(space(name), engine, seed=3, exhaustive=True)
    for one in followed(search, MANY):
        strategy, graph = one.strategy, one.strategy.base.graph
        job = replace(strategy.job, recompute=strategy.family.kinds[one.at])
        peak = max(rank_peak(job, graph, rank)[0] for rank in ranks_of(job, graph))
        room = search._room[id(strategy.base)].room_bytes * smaller
        if peak > room:
            room = peak  # a device on which it just fits
        layout, costs = job.layout, strategy.costs
        pipe = Pipe(ranks=layout.pp, micro_batches=job.data.grad_accum, send_s=costs.send_s(job))
        plain = replace(job, layout=replace(layout, vpp=1, schedule="1f1b"))
        least = least_of(costs.grid, plain, [plain.engine])
        assert least.kept.states_bytes <= layout.pp * room, job
        found = Balance(costs, strategy.family).seconds(pipe, least, room, 0.0)
        assert found is not None, job
        assert found <= step_time(job, graph).step_s * SLACK, job


@pytest.mark.parametrize("seed", range(200))
def test_blocks_on_two_streams_take_no_less_than_their_bound(seed: int) -> None:
    rng = random.Random(seed)
    runs = [
        (
            rng.randint(1, 4),
            rng.uniform(0.0, 2.0),
            rng.choice([0.0, rng.uniform(0.0, 3.0)]),
            rng.choice([0.0, 0.5, 2.0]),
        )
        for _ in range(rng.randint(1, 4))
    ]
    back = [
        Wrapped(compute_s=compute, gather_s=gather, reduce_s=reduce)
        for count, compute, gather, reduce in runs
        for _ in range(count)
    ]
    assert piped_s(runs) <= backward_s(back) * SLACK
    assert piped_s([(*run[:3], 0.0) for run in runs]) <= forward_s(back) * SLACK


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_is_faster_than_what_is_said_of_all(seed: int) -> None:
    """Every cut of a few layers of two kinds, one after another."""
    rng = random.Random(seed)
    kinds = [rng.uniform(0.2, 2.0), 1.0]
    counts = [rng.choice([0, 1, 3]), rng.randint(4, 8)]
    layers = [kinds[0]] * counts[0] + [kinds[1]] * counts[1]
    costs = _Layers(layers, first_s=rng.choice([0.0, 0.3, 4.0]), last_s=rng.choice([0.0, 0.7, 4.0]))
    ranks, micro_batches = rng.randint(1, 5), rng.choice([1, 2, 5, 60])
    send_s = rng.choice([0.0, 0.1])
    found = evenly_bound_s(costs, ranks, micro_batches, send_s)
    each = [
        any_chunks_bound_s(costs, costs.cut(places), micro_batches, send_s)
        for places in itertools.combinations(range(1, len(layers)), ranks - 1)
    ]
    assert found <= min(each) * SLACK
    whole = evenly_bound_s(costs, ranks, micro_batches, send_s, interleaves=False)
    one_chunk = [
        step_bound_s(costs.cut(places), micro_batches, send_s)
        for places in itertools.combinations(range(1, len(layers)), ranks - 1)
    ]
    assert found <= whole <= min(one_chunk) * SLACK
    fills_are_short = micro_batches == 60
    if fills_are_short and not counts[0] and not costs.first_s:  # the mean would be up to a layer less
        assert found >= 0.98 * min(each)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 1), (4, 3), (16, 15), (16, 120)])
def test_ranks_that_share_work_as_1f1b_lets_them_reach_the_bound_of_one_chunk(ranks: int, micro_batches: int) -> None:
    """Each rank has (m - 1) / m of what the one before it has: all of them then end at once, and no share is faster."""
    shares = [(1 - 1 / micro_batches) ** rank for rank in range(ranks)]
    times = [StageTime(both_s=one, first_chunk_s=one, chunks_s=((one, 0.0),)) for one in shares]
    exact = step_bound_s(times, micro_batches, 0.0)
    assert one_chunk_bound_s(sum(shares), ranks, micro_batches, 0.0) == pytest.approx(exact, rel=1e-12)


class _Layers:
    """What a bound asks of a shape's costs."""

    def __init__(self, layers: list[float], *, first_s: float, last_s: float) -> None:
        self.layers, self.first_s, self.last_s = layers, first_s, last_s
        self.shortest_s, self.whole_s = min(layers), sum(layers) + first_s + last_s
        self.longest = max(((one, layers.count(one)) for one in layers), key=lambda one: one[0] * one[1])

    def cut(self, places: tuple[int, ...]) -> list[StageTime]:
        found = [sum(self.layers[a:b]) for a, b in itertools.pairwise([0, *places, len(self.layers)])]
        found[0] += self.first_s
        found[-1] += self.last_s
        return [StageTime(both_s=one, first_chunk_s=one, chunks_s=((one, 0.0),)) for one in found]
