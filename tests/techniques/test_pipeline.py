"""Stages, sends, the bubble by hand (arXiv 2104.04473, section 2.2), and a chart whose seconds are the step's."""

from itertools import pairwise

import pytest
from tests.techniques.conftest import BASE, MEGATRON

import ullage
from ullage.timing.step import step_time

INTERLEAVED = {"pp": 4, "vpp": 2, "schedule": "interleaved-1f1b"}
TORCH = {"stack": "torchtitan", "engine": {"name": "fsdp2"}}


def data(micro_batches: int) -> dict:
    return {"seq_len": 2048, "micro_batch": 1, "grad_accum": micro_batches}


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 8)])
def test_the_bubble_of_equal_stages(show, stages: int, micro_batches: int) -> None:
    shown = show("pipeline", MEGATRON, layout={"pp": stages}, data=data(micro_batches))
    equal = shown.part("Bubble").rows[-1]
    assert equal[1] == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_stages_hold_the_model_and_fewer_micro_batches_each(show) -> None:
    part = show("pipeline", MEGATRON, layout={"pp": 4}, data=data(8)).part("Stages")
    assert part.total("layers") == 32
    assert part.total("parameters") == 8_030_261_248
    assert part.column("in_flight") == (4, 3, 2, 1)
    assert part.column("ends") == ("embedding", "", "", "head")


def test_allocated_is_the_estimates(show) -> None:
    shown = show("pipeline", MEGATRON, layout={"pp": 4})
    found = tuple(rank.allocated_bytes for rank in ullage.estimate(shown.job).ranks)
    assert shown.part("Stages").column("allocated_bytes") == found


@pytest.mark.parametrize(
    ("layout", "stage", "sends"),
    [
        ({"pp": 4}, 0, {"forward": 8}),
        ({"pp": 4}, 2, {"forward": 8, "backward": 8}),
        ({"pp": 4}, 3, {"backward": 8}),
        (INTERLEAVED, 0, {"forward": 16, "backward": 8}),
    ],
)
def test_sends(show, layout: dict, stage: int, sends: dict) -> None:
    part = show("pipeline", MEGATRON, layout=layout, data=data(8), stage=stage).part("What this stage sends")
    assert dict(zip(part.column("phase"), part.column("count"), strict=True)) == sends
    assert set(part.column("payload_bytes")) == {2048 * 4096 * 2}


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (MEGATRON, {"layout": {"pp": 4}}),
        (MEGATRON, {"layout": INTERLEAVED}),
        (BASE | TORCH, {"layout": {"pp": 2, "schedule": "gpipe"}}),
    ],
    ids=str,
)
def test_the_chart_is_the_steps_time(show, base: dict, changes: dict) -> None:
    chart = show("pipeline", base, **changes, data=data(8)).gantt
    assert chart is not None
    assert chart.end_s == pytest.approx(step_time(ullage.read_job(base | changes | {"data": data(8)})).step_s)
    for slots in chart.ranks:
        assert len(slots) == 2 * 8 * chart.chunks
        assert slots[0].start_s >= 0
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in pairwise(slots))


def test_a_backward_waits_for_the_stage_behind(show) -> None:
    chart = show("pipeline", MEGATRON, layout={"pp": 4}, data=data(8)).gantt
    assert chart is not None
    ends = {(stage, slot.kind, slot.micro_batch): slot for stage, slots in enumerate(chart.ranks) for slot in slots}
    for (stage, kind, micro_batch), slot in ends.items():
        behind = ends.get((stage + 1 if kind == "B" else stage - 1, kind, micro_batch))
        assert behind is None or slot.start_s >= behind.end_s - 1e-9


def test_a_job_without_it(show) -> None:
    with pytest.raises(ullage.InvalidInput, match=r"layout.pp = 1.*set layout.pp"):
        show("pipeline")
