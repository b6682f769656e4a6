"""Plans of small jobs: what each goal answers, and what is said where nothing fits or nothing exists."""

from __future__ import annotations

import pytest

import ullage
from ullage.errors import Contradiction, Infeasible, InvalidInput, UllageError, Unsupported
from ullage.planner.goals import GOALS, effort, smaller
from ullage.timing.step import step_time

SMALL = {
    "model": {"base": "llama-3.2-1b", "num_hidden_layers": 4},
    "cluster": "4xA100-SXM-40GB",
    "data": {"seq_len": 2048, "global_batch": 16},
}


def small(**keys: object) -> dict[str, object]:
    return {**SMALL, **keys}


@pytest.fixture(scope="module")
def fastest() -> ullage.Planned:
    return ullage.plan(SMALL, engines=("fsdp2", "megatron", "ddp"))


def test_every_plan_fits_and_is_a_job_of_its_own(fastest: ullage.Planned) -> None:
    assert fastest.plans[0].name == "fastest"
    for one in fastest.plans:
        assert one.estimate.verdict == "fits"
        assert ullage.estimate(one.job).peak == one.estimate.peak
        assert step_time(one.job).step_s == pytest.approx(one.time.step_s)
        sequences = one.job.data.micro_batch * one.job.data.grad_accum * one.job.layout.dp
        assert sequences == 16


def test_the_first_is_the_fastest_and_the_others_say_what_they_lost_by(fastest: ullage.Planned) -> None:
    first, *others = fastest.plans
    assert others
    for one in others:
        assert one.time.step_s >= first.time.step_s
        assert any("slower than the first" in why or "as fast as the first" in why for why in one.why)


def test_the_simplest_takes_least_effort(fastest: ullage.Planned) -> None:
    simple = ullage.plan(SMALL, engines=("fsdp2", "megatron", "ddp"), goal="simplest", top=1).plans[0]
    assert effort(simple.job) <= min(effort(one.job) for one in fastest.plans)
    assert simple.job.engine.name == "ddp"


def test_a_schedule_that_is_written_runs() -> None:
    job = small(engine={"name": "fsdp2"}, layout={"pp": 2, "schedule": "gpipe"})
    for one in ullage.plan(job).plans:
        assert (one.job.layout.pp, one.job.layout.vpp, one.job.layout.schedule) == (2, 1, "gpipe")


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipev"])
def test_a_schedule_that_is_not_searched_is_said(schedule: str) -> None:
    with pytest.raises(Unsupported, match="not planned yet"):
        ullage.plan(small(engine={"name": "fsdp2"}, layout={"schedule": schedule}))


def test_what_limits_the_simplest_is_of_its_own_search() -> None:
    """Its whole batch is in one pass and nothing is recomputed: more memory would make it no simpler."""
    found = ullage.plan(small(cluster="4xA100-SXM-80GB"), engines=("fsdp2", "megatron", "ddp"))
    simple = next(one for one in found.plans if one.name == "simplest")
    assert (simple.job.data.grad_accum, simple.job.recompute.kind) == (1, "none")
    assert simple.limited_by != "memory"


def test_keys_that_are_written_stay(fastest: ullage.Planned) -> None:
    job = small(engine={"name": "megatron"}, layout={"tp": 2}, recompute="full")
    for one in ullage.plan(job).plans:
        assert (one.job.engine.name, one.job.layout.tp, one.job.recompute.kind) == ("megatron", 2, "full")
        assert one.time.step_s >= fastest.plans[0].time.step_s


def test_fewest_gpus_is_one_where_one_is_enough() -> None:
    (found,) = ullage.plan(SMALL, engines=("single", "megatron"), goal="fewest-gpus", top=1).plans
    assert found.job.cluster.gpus == 1


def test_the_cheapest_costs_no_more_gpu_seconds_than_the_fastest(fastest: ullage.Planned) -> None:
    (found,) = ullage.plan(SMALL, engines=("single", "megatron"), goal="cheapest", top=1).plans
    assert found.time.step_s * found.job.cluster.gpus <= fastest.plans[0].time.step_s * 4


def test_a_longer_sequence_than_the_longest_does_not_fit() -> None:
    job = small(layout={"pp": 1, "cp": 1})
    (found,) = ullage.plan(job, engines=("fsdp2",), goal="longest-sequence", top=1).plans
    longest = found.job.data.seq_len
    assert longest > 2048
    longer = {**job, "data": {"seq_len": longest * 5 // 4, "global_batch": 16}}
    assert not ullage.plan(longer, engines=("fsdp2",), top=1).plans


def test_the_largest_batch_accumulates_nothing() -> None:
    job = {**SMALL, "data": {"seq_len": 2048}}
    (found,) = ullage.plan(job, engines=("fsdp2",), goal="largest-batch", top=1).plans
    assert found.job.data.grad_accum == 1
    assert found.job.data.micro_batch > 1


LARGE = {
    "model": "llama-3.1-8b",
    "cluster": "2xA100-SXM-40GB",
    "data": {"seq_len": 4096, "global_batch": 8},
    "offload": {"optimizer": "none"},
}


def test_what_would_fit_does() -> None:
    found = ullage.plan(LARGE, engines=("fsdp2",), top=1)
    assert found.plans == ()
    assert found.nothing_fits is not None
    more = found.nothing_fits.remedies[0]
    assert "GPUs" in more.what
    again = ullage.plan({**LARGE, **more.change.as_dict()}, engines=("fsdp2",), top=1)
    assert again.plans


@pytest.mark.parametrize(
    ("job", "kind", "said"),
    [
        (small(layout={"tp": 3}), Infeasible, "layout.tp = 3"),
        (small(layout={"tp": 4, "dp": 4}), Infeasible, "4 GPUs"),
        (small(data={"seq_len": 2048, "global_batch": 7}, layout={"dp": 4}), Infeasible, "data.global_batch = 7"),
        (small(data={"seq_len": 2048}), InvalidInput, "data.global_batch"),
        (
            small(data={"seq_len": 2048, "global_batch": 8, "micro_batch": 2, "grad_accum": 2}),
            Contradiction,
            "global_batch",
        ),
        (small(layout={"tq": 2}), InvalidInput, "tq"),
        (small(engine={"name": "megatrn"}), InvalidInput, "megatron"),
    ],
)
def test_what_cannot_be_planned_is_said(job: dict[str, object], kind: type[UllageError], said: str) -> None:
    with pytest.raises(kind, match=said.replace(".", r"\.")):
        ullage.plan(job)


def test_seven_gpus_have_plans() -> None:
    found = ullage.plan(
        {**SMALL, "cluster": "7xA100-SXM-40GB", "data": {"seq_len": 2048, "global_batch": 14}}, engines=("fsdp2",)
    )
    assert found.plans
    assert all(one.job.layout.world == 7 for one in found.plans)


def test_parts_of_a_cluster() -> None:
    from ullage.hardware.catalogue import cluster

    assert [part.gpus for part in smaller(cluster("3x2xH100-SXM-80GB"))] == [6, 4, 2, 1]
    assert [part.gpus for part in smaller(cluster("256x8xH100-SXM-80GB"))][:4] == [2048, 1024, 512, 256]


def test_every_goal_is_told() -> None:
    assert set(GOALS) == {"fastest", "cheapest", "fewest-gpus", "longest-sequence", "largest-batch", "simplest"}


def test_a_model_whose_name_no_file_can_have() -> None:
    with pytest.raises(UllageError, match="not in the catalogue"):
        ullage.plan({**SMALL, "model": "x" * 400})
