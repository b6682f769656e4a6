"""What recomputation keeps, runs again, costs and saves, against the estimate and the time."""

from dataclasses import replace

import pytest
from tests.techniques.conftest import BASE, MEGATRON

import ullage
from ullage.job.job import Recompute
from ullage.memory.ledger import by_category
from ullage.timing.step import step_time

STREAM = 2048 * 4096 * 2
TITAN = BASE | {"stack": "torchtitan", "engine": {"name": "fsdp2"}}
PIPELINE = MEGATRON | {"layout": {"tp": 2, "pp": 2}}


def test_a_checkpointed_layer_keeps_its_input(show) -> None:
    part = show("checkpointing", TITAN, recompute="full").part("What a layer keeps for its backward")
    ((_, how, layers, count, without, kept),) = part.rows
    assert (how, layers, count, kept) == ("keeps its input", 1, 32, STREAM)
    assert without > 10 * kept


def test_every_second_layer(show) -> None:
    part = show("checkpointing", TITAN, recompute={"every": 2}).part("What a layer keeps for its backward")
    assert {row[1]: row[3] for row in part.rows} == {"keeps all": 16, "keeps its input": 16}


@pytest.mark.parametrize(
    ("base", "recompute"),
    [
        (TITAN, "full"),
        (TITAN, "selective"),
        (PIPELINE, "full"),
        (PIPELINE, "selective"),
        (PIPELINE, {"modules": ["mlp"]}),
    ],
    ids=str,
)
def test_the_sums_are_those_of_estimate_and_time(show, base: dict, recompute: object) -> None:
    shown = show("checkpointing", base, recompute=recompute, stage=0)
    again, cost = shown.part("What runs again before a layer's backward"), shown.part("What it costs and saves")
    without, with_it, more = cost.rows
    assert again.total("seconds") == pytest.approx(with_it[2])
    assert more[1] == sum(
        count * flops for count, flops in zip(again.column("count"), again.column("flops"), strict=True)
    )
    plain = replace(shown.job, recompute=Recompute())
    assert (without[3], with_it[3]) == (step_time(plain).step_s, step_time(shown.job).step_s)
    for job, row in ((plain, without), (shown.job, with_it)):
        assert row[5] == ullage.estimate(job).ranks[0].allocated_bytes


def test_activations_are_those_of_the_account(show) -> None:
    shown = show("checkpointing", TITAN, recompute="full")
    without, with_it, more = shown.part("What it costs and saves").column("activation_bytes")
    assert with_it == by_category(ullage.estimate(shown.job).ledger)["activations"]
    assert without == by_category(ullage.estimate(ullage.read_job(TITAN)).ledger)["activations"]
    assert more == with_it - without < 0


def test_flops_are_those_of_the_model(show) -> None:
    """Causal attention counted half: forward 2 of flops_per_token's 6, which count it whole."""
    rows = show("checkpointing", TITAN, recompute="full").part("What it costs and saves").rows
    estimate = ullage.estimate(ullage.read_job(TITAN))
    assert 0.9 < rows[0][1] * 8 / estimate.flops_per_step < 1.0


def test_a_job_without_it(show) -> None:
    with pytest.raises(ullage.InvalidInput, match=r"recompute = none.*full or selective"):
        show("checkpointing")
