"""When a pipeline's ranks are through, against what can be written down."""

import pytest

from ullage.schedule import actions
from ullage.timing.overlap import Wrapped, backward_s, forward_s
from ullage.timing.pipeline import StageTime, makespan


def plan(schedule: str, stages: int, micro_batches: int, chunks: int = 1):
    return [
        actions(schedule, stages=stages, rank=rank, micro_batches=micro_batches, chunks=chunks)
        for rank in range(stages)
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages(schedule: str) -> None:
    stages = [[StageTime(forward_s=1.0, backward_s=2.0)]] * 4
    assert max(makespan(plan(schedule, 4, 8), stages)) == (8 + 3) * 3.0


def test_interleaving_divides_the_bubble() -> None:
    stages = [[StageTime(forward_s=0.5, backward_s=1.0)] * 2] * 4
    assert max(makespan(plan("interleaved-1f1b", 4, 8, 2), stages)) == pytest.approx(8 * 3.0 + 3 * 1.5)


def test_the_slowest_stage_sets_the_pace_and_sends_delay() -> None:
    fast, slow = [StageTime(forward_s=1.0, backward_s=2.0)], [StageTime(forward_s=2.0, backward_s=4.0)]
    assert max(makespan(plan("1f1b", 2, 8), [fast, slow])) >= 8 * 6.0
    assert max(makespan(plan("1f1b", 2, 8), [fast, fast], send_s=0.5)) > max(makespan(plan("1f1b", 2, 8), [fast, fast]))


def test_gathers_hide_behind_computing() -> None:
    blocks = [Wrapped(compute_s=2.0, gather_s=1.0, reduce_s=0.5)] * 4
    assert forward_s(blocks) == 1.0 + 4 * 2.0  # the first is waited for
    assert backward_s(blocks) == 1.0 + 4 * 2.0 + 0.5  # and the last reduction


def test_gathers_that_take_longer_are_waited_for() -> None:
    blocks = [Wrapped(compute_s=1.0, gather_s=2.0)] * 4
    assert forward_s(blocks) == 4 * 2.0 + 1.0


def test_nothing_to_gather() -> None:
    blocks = [Wrapped(compute_s=1.0)] * 3
    assert forward_s(blocks) == backward_s(blocks) == 3.0
    assert backward_s([]) == 0.0
