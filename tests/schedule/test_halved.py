"""Schedules that halve backwards, against torch's own objects and the tables of their papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torchs

from ullage.errors import Infeasible, InvalidInput
from ullage.schedule import Action, actions, bubble_fraction, finish_times, in_flight, stages_on

CHUNKS = {"zb-h1": 1, "zb-h2": 1, "zbv": 2, "v-half": 2, "v-min": 2, "dualpipe": 1, "dualpipev": 2}
SHAPES = [(2, 8), (4, 8), (4, 11), (6, 24), (8, 16), (8, 32)]


def every_rank(schedule: str, stages: int, micro_batches: int) -> list[tuple[Action, ...]]:
    chunks = CHUNKS[schedule]
    return [
        actions(schedule, stages=stages, rank=rank, micro_batches=micro_batches, chunks=chunks)
        for rank in range(stages)
    ]


def placed(schedule: str, stages: int) -> list[tuple[int, ...]]:
    return [stages_on(schedule, rank, pp=stages, vpp=CHUNKS[schedule]) for rank in range(stages)]


def _torch_order(name: str, stages: int, micro_batches: int, rank: int) -> list[tuple[str, int, int]]:
    """torch's actions of a rank as (kind, stage, micro-batch), without what it does between them."""
    made: Any = object.__new__(getattr(torchs, name))
    local = 1 if name == "ScheduleInterleavedZeroBubble" else 2
    made.pp_group_size, made._n_microbatches, made.n_local_stages = stages, micro_batches, local
    made.num_stages, made.microbatches_per_round = local * stages, micro_batches // max(1, micro_batches // stages)
    found: list[tuple[str, int, int]] = []
    for action in made._calculate_single_rank_operations(rank):
        for one in action.sub_actions or (action,) if action is not None else ():
            found.append((_KINDS[one.computation_type.name], one.stage_index, one.microbatch_index))
    return found


_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
TORCHS = {"zb-h1": "ScheduleInterleavedZeroBubble", "zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}


@pytest.mark.parametrize("schedule", TORCHS)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32)])
def test_the_order_is_torchs(schedule: str, stages: int, micro_batches: int) -> None:
    for rank, mine in enumerate(every_rank(schedule, stages, micro_batches)):
        held = placed(schedule, stages)[rank]
        told = [(one.kind, held[one.chunk], one.micro_batch) for one in mine]
        assert told == _torch_order(TORCHS[schedule], stages, micro_batches, rank)


def _shapes(schedule: str) -> list[tuple[int, int]]:
    both_ways = schedule == "dualpipe"
    return [(p, m) for p, m in SHAPES if not (schedule.startswith("dual") and (m < 2 * p or (both_ways and m % 2)))]


@pytest.mark.parametrize("schedule", CHUNKS)
def test_every_pass_runs_once_in_order_and_without_deadlock(schedule: str) -> None:
    for stages, micro_batches in _shapes(schedule):
        ranks = every_rank(schedule, stages, micro_batches)
        ends = finish_times(ranks, stages=placed(schedule, stages))  # asserts that every action ran
        assert all(list(mine) == sorted(mine) for mine in ends)
        for mine in ranks:
            whole = {one for one in mine if one.kind == "B"}
            for kind, others in (("F", set()), ("I", whole), ("W", whole)):
                found = [(one.chunk, one.micro_batch) for one in mine if one.kind == kind]
                found += [(one.chunk, one.micro_batch) for one in others]
                each = micro_batches if schedule == "dualpipe" else CHUNKS[schedule] * micro_batches
                assert len(found) == len(set(found)) == each
            halves = [(one.kind, one.chunk, one.micro_batch) for one in mine]
            for one in mine:
                if one.kind == "W":
                    assert halves.index(("I", one.chunk, one.micro_batch)) < halves.index(
                        ("W", one.chunk, one.micro_batch)
                    )


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 16), (6, 24), (8, 32)])
def test_in_flight_is_the_papers(stages: int, micro_batches: int) -> None:
    """arXiv 2401.10241, table 1: ZB-H1 p, ZB-H2 2p - 1; section 6: ZB-V as 1F1B. arXiv 2412.19437, table 2: 1F1B and ZB1P PP, DualPipe
    PP + 1; its repository: DualPipeV PP + 1 of a pipeline of PP stages on half as many ranks."""
    expected = {
        "zb-h1": stages, "zb-h2": 2 * stages - 1, "zbv": 2 * stages, "dualpipe": stages + 1, "dualpipev": 2 * stages + 1,
    }  # fmt: skip
    for schedule, most in expected.items():
        assert {in_flight(mine) for mine in every_rank(schedule, stages, micro_batches)} == {most}


@pytest.mark.parametrize(("stages", "micro_batches"), [(8, 40), (16, 64), (24, 96)])
def test_building_blocks_hold_a_half_and_a_third(stages: int, micro_batches: int) -> None:
    """arXiv 2405.15362: V-Half and V-Min hold p / 2 and p / 3 of what 1F1B's p do, and a micro-batch or so that does not grow with p."""
    for schedule, share in (("v-half", 1 / 2), ("v-min", 1 / 3)):
        most = max(in_flight(mine) for mine in every_rank(schedule, stages, micro_batches))
        assert stages * share <= most / 2 <= stages * share + 2


def test_zb_h2_and_zbv_have_no_bubble() -> None:
    """Equal times of a forward and each half of a backward: from its first pass to its last no rank waits."""
    for schedule in ("zb-h2", "zbv"):
        ranks = every_rank(schedule, 4, 24)
        for mine in finish_times(ranks, stages=placed(schedule, 4)):
            assert mine[-1] - mine[0] == len(mine) - 1
    plain = [actions("1f1b", stages=4, rank=rank, micro_batches=24) for rank in range(4)]
    assert bubble_fraction(every_rank("zb-h1", 4, 24)) < bubble_fraction(plain) / 2


def test_dualpipe_holds_every_stage_twice() -> None:
    held = [stage for mine in placed("dualpipe", 6) for stage in mine]
    assert sorted(held) == sorted([*range(6), *range(6)])
    assert placed("dualpipe", 6)[1] == placed("dualpipe", 6)[4][::-1]


def test_what_they_are_not_made_for() -> None:
    with pytest.raises(InvalidInput, match=r"layout\.vpp"):
        actions("zbv", stages=4, rank=0, micro_batches=8, chunks=1)
    with pytest.raises(InvalidInput, match=r"layout\.vpp"):
        actions("zb-h1", stages=4, rank=0, micro_batches=8, chunks=2)
    for schedule, stages, micro_batches in (("dualpipev", 4, 7), ("dualpipe", 4, 9), ("dualpipe", 3, 12)):
        with pytest.raises(Infeasible):
            every_rank(schedule, stages, micro_batches)
