"""The schedules' order, what they keep in flight and what they waste, against the published formulas."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.errors import Infeasible, InvalidInput, UnknownName
from ullage.schedule import (
    Action,
    actions,
    bubble_fraction,
    chunks_in_flight,
    compact,
    finish_times,
    in_flight,
    torch_group_size,
)

PLAIN = ("1f1b", "gpipe", "interleaved-1f1b")

Pipeline = dict[str, int | None]


def every_rank(schedule: str, *, stages: int, **rest: int | None) -> tuple[tuple[Action, ...], ...]:
    return tuple(actions(schedule, stages=stages, rank=rank, **rest) for rank in range(stages))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, Pipeline]:
    schedule = draw(st.sampled_from(PLAIN))
    stages = draw(st.integers(1, 6))
    micro_batches = draw(st.integers(1, 20))
    chunks = 1 if schedule == "1f1b" else draw(st.integers(1, 4))
    group_size = None
    if schedule == "interleaved-1f1b":
        group_size = draw(st.integers(min(stages, micro_batches), micro_batches))
        rest = micro_batches % group_size
        if 0 < rest < stages:  # Megatron refuses it: whole groups only
            micro_batches -= rest
    return schedule, {
        "stages": stages, "micro_batches": micro_batches, "chunks": chunks, "group_size": group_size,
    }  # fmt: skip


@given(pipelines())
def test_each_forward_runs_once_and_before_its_backward(pipeline: tuple[str, Pipeline]) -> None:
    schedule, shape = pipeline
    work = set(product(range(shape["chunks"]), range(shape["micro_batches"])))
    for mine in every_rank(schedule, **shape):
        assert len(mine) == 2 * len(work)
        done: set[tuple[int, int]] = set()
        for action in mine:
            job = (action.chunk, action.micro_batch)
            assert (job in done) == (action.kind == "B")
            done ^= {job} if action.kind == "F" else set()
        assert done == work


@given(pipelines())
def test_all_ranks_run_together_without_deadlock(pipeline: tuple[str, Pipeline]) -> None:
    schedule, shape = pipeline
    ranks = every_rank(schedule, **shape)
    ends = finish_times(ranks)  # asserts that every action ran
    assert [len(mine) for mine in ends] == [len(mine) for mine in ranks]
    assert all(mine == tuple(sorted(mine)) for mine in ends)


@given(pipelines())
def test_in_flight_is_the_formula(pipeline: tuple[str, Pipeline]) -> None:
    schedule, shape = pipeline
    p, m, v = shape["stages"], shape["micro_batches"], shape["chunks"]
    for rank, mine in enumerate(every_rank(schedule, **shape)):
        expected = {
            "gpipe": v * m,
            "1f1b": min(m, p - rank),
            "interleaved-1f1b": min(v * m, (v - 1) * (shape["group_size"] or p) + 2 * (p - 1 - rank) + 1),
        }[schedule]
        assert in_flight(mine) == expected


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "expected"),
    [
        # Counted from the schedule objects of torch.distributed.pipelining 2.13.
        (2, 2, 4, [5, 3]),
        (4, 2, 8, [11, 9, 7, 5]),
        (4, 4, 8, [19, 17, 15, 13]),
        (8, 2, 16, [23, 21, 19, 17, 15, 13, 11, 9]),
        (8, 2, 8, [16, 16, 16, 16, 15, 13, 11, 9]),
    ],
)
def test_interleaved_in_flight_as_torch_has_it(
    stages: int, chunks: int, micro_batches: int, expected: list[int]
) -> None:
    group_size = torch_group_size(stages, micro_batches)
    ranks = every_rank(
        "interleaved-1f1b", stages=stages, micro_batches=micro_batches, chunks=chunks, group_size=group_size
    )
    assert [in_flight(mine) for mine in ranks] == expected


def test_chunks_in_flight_are_the_first_forwards() -> None:
    """Of 4 ranks with 2 chunks, turned to after 4 micro-batches, as torch counts them above: 4 of the first chunk, 4 of the second, and
    so on, before the first backward has run."""
    ranks = every_rank("interleaved-1f1b", stages=4, micro_batches=8, chunks=2, group_size=4)
    assert [chunks_in_flight(mine, 2) for mine in ranks] == [(7, 4), (5, 4), (4, 3), (4, 1)]


def test_interleaved_order_is_megatrons_table() -> None:
    """The example in the docstring of get_schedule_table: PP = 2, 5 micro-batches, 2 chunks, groups of 3."""
    mine = actions("interleaved-1f1b", stages=2, rank=0, micro_batches=5, chunks=2, group_size=3)
    assert [action.micro_batch for action in mine if action.kind == "F"] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [action.chunk for action in mine if action.kind == "F"] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert [action.chunk for action in mine if action.kind == "B"] == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0]


def test_torch_makes_equal_rounds() -> None:
    assert torch_group_size(4, 8) == 4
    assert torch_group_size(4, 6) == 6  # one round
    assert torch_group_size(4, 10) == 5  # two rounds
    assert torch_group_size(8, 3) == 3  # fewer micro-batches than stages
    with pytest.raises(Infeasible, match="a multiple of 2"):
        torch_group_size(4, 9)


@given(st.integers(1, 8), st.integers(1, 30), st.floats(0.1, 10), st.floats(0.1, 10))
def test_gpipe_and_1f1b_waste_the_same_bubble(stages: int, micro_batches: int, forward: float, backward: float) -> None:
    """(p - 1) / (m + p - 1), GPipe (arXiv:1811.06965) and PipeDream-Flush alike."""
    for schedule in ("gpipe", "1f1b"):
        ranks = every_rank(schedule, stages=stages, micro_batches=micro_batches)
        bubble = bubble_fraction(ranks, forward_s=forward, backward_s=backward)
        assert bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-9)


def test_the_slowest_stage_sets_the_pace_and_sends_delay() -> None:
    ranks = every_rank("1f1b", stages=2, micro_batches=8)
    even = max(mine[-1] for mine in finish_times(ranks))
    slow = finish_times(ranks, lambda rank, action: (1 + rank) * (1.0 if action.kind == "F" else 2.0))
    assert max(mine[-1] for mine in slow) >= 8 * 6.0
    assert max(mine[-1] for mine in finish_times(ranks, send_s=0.5)) > even == (8 + 1) * 3.0


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_chunks_divide_the_bubble(stages: int, rounds: int, chunks: int) -> None:
    """Bubble / ideal = (p - 1) / (v m), Narayanan et al. (arXiv:2104.04473, section 2.2), for whole rounds."""
    micro_batches = rounds * stages
    ranks = every_rank("interleaved-1f1b", stages=stages, micro_batches=micro_batches, chunks=chunks)
    ideal = chunks * micro_batches
    assert bubble_fraction(ranks) == pytest.approx((stages - 1) / (ideal + stages - 1), abs=1e-9)


def unfolded(runs: tuple[tuple[int, tuple[Action, ...]], ...]) -> Iterator[tuple[str, int]]:
    for repeats, pattern in runs:
        yield from [(action.kind, action.chunk) for action in pattern] * repeats


@given(pipelines(), st.data())
def test_compact_unfolds_to_the_same_pattern(pipeline: tuple[str, Pipeline], data: st.DataObject) -> None:
    schedule, shape = pipeline
    mine = actions(schedule, rank=data.draw(st.integers(0, shape["stages"] - 1)), **shape)
    assert list(unfolded(compact(mine))) == [(action.kind, action.chunk) for action in mine]


@given(st.lists(st.tuples(st.sampled_from("FB"), st.integers(0, 1)), max_size=60))
def test_compact_loses_nothing_of_any_sequence(words: list[tuple[str, int]]) -> None:
    sequence = [Action(kind, chunk, index) for index, (kind, chunk) in enumerate(words)]
    runs = compact(sequence)
    assert list(unfolded(runs)) == words
    starts = list(chain.from_iterable([pattern[0].micro_batch] for _, pattern in runs))
    assert starts == sorted(starts)


@pytest.mark.parametrize("micro_batches", [8, 4096])
def test_compact_1f1b_is_three_runs(micro_batches: int) -> None:
    runs = compact(actions("1f1b", stages=4, rank=0, micro_batches=micro_batches))
    shape = [(repeats, "".join(action.kind for action in pattern)) for repeats, pattern in runs]
    assert shape == [(4, "F"), (micro_batches - 4, "BF"), (4, "B")]


def test_compact_does_not_grow_with_the_micro_batches() -> None:
    few, many = (compact(actions("interleaved-1f1b", stages=8, rank=0, micro_batches=m, chunks=4)) for m in (64, 1024))
    assert len(few) == len(many)


def test_wrong_input_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean gpipe"):
        actions("gpip", stages=2, rank=0, micro_batches=4, chunks=1)
    with pytest.raises(InvalidInput, match="use interleaved-1f1b"):
        actions("1f1b", stages=2, rank=0, micro_batches=4, chunks=2)
    with pytest.raises(InvalidInput, match="allowed: 0 to 1"):
        actions("1f1b", stages=2, rank=2, micro_batches=4, chunks=1)
    with pytest.raises(InvalidInput, match="at least 1"):
        actions("1f1b", stages=2, rank=0, micro_batches=0, chunks=1)


@pytest.mark.parametrize(
    ("micro_batches", "group_size"),
    [
        (2, None),  # fewer micro-batches than the default group
        (8, 9),  # a group larger than all micro-batches
        (8, 3),  # a group smaller than the pipeline
        (9, 4),  # a last group smaller than the pipeline
    ],
)
def test_interleaved_refuses_what_megatron_refuses(micro_batches: int, group_size: int | None) -> None:
    with pytest.raises(Infeasible):
        actions("interleaved-1f1b", stages=4, rank=0, micro_batches=micro_batches, chunks=2, group_size=group_size)
