"""Who owns what, and what ZeRO sends: by hand, as its paper counts (arXiv 1910.02054, section 7)."""

import pytest
from tests.techniques.conftest import BASE, MEGATRON

import ullage
from ullage.memory.ledger import by_category

HALF = {"params": "bf16", "compute": "bf16", "grads": "bf16", "master": "fp32", "reduce": "bf16"}
PARAMETERS = 8_030_261_248
ONE = {"data": {"seq_len": 2048, "micro_batch": 1}}


def deepspeed(stage: int) -> dict:
    return {"engine": {"name": "deepspeed", "zero_stage": stage}, "precision": HALF}


def test_stage_3_sends_three_times_the_parameters(show) -> None:
    """Gathered for the forward, for the backward, and reduced: 3 (N - 1) / N of the parameters' bytes, half more than an all-reduce."""
    mine, plain = show("zero", **ONE, **deepspeed(3)).part("Volume").rows
    assert mine[1] == 3 * 7 * PARAMETERS * 2 // 8
    assert plain[1] == 2 * 7 * PARAMETERS * 2 // 8
    assert mine[2] == pytest.approx(1.5)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_send_what_an_all_reduce_does(show, stage: int) -> None:
    assert show("zero", **ONE, **deepspeed(stage)).part("Volume").column("of_all_reduce") == pytest.approx((1.0, 1.0))


def test_micro_batches_that_are_reduced_one_by_one_send_more(show) -> None:
    ratio = show("zero", **deepspeed(2)).part("Volume").rows[0][2]
    assert ratio == pytest.approx((4 + 1) / 2)  # four reductions and a gather, each half an all-reduce


def test_the_steps_add_up_to_the_volume(show) -> None:
    shown = show("zero", **deepspeed(3))
    sent = [part.total("wire_bytes") for part in shown.parts if part.title.startswith(("Forward", "Backward"))]
    assert sum(sent) == pytest.approx(shown.part("Volume").rows[0][1], abs=len(sent))


def test_sixteen_bytes_a_parameter(show) -> None:
    part = show("zero", **deepspeed(3)).part("What each rank owns")
    assert part.column("bytes_per_parameter") == (2, 2, 4, 4, 4)
    assert part.total("whole_bytes") == 16 * PARAMETERS
    assert part.total("owned_bytes") == 2 * PARAMETERS


@pytest.mark.parametrize(
    "changes",
    [
        {"base": BASE, "engine": {"name": "fsdp2"}},
        {"base": BASE} | deepspeed(2),
        {"base": BASE, "engine": {"name": "zero1"}},
        {"base": MEGATRON, "layout": {"tp": 2, "pp": 2}},
        {"base": MEGATRON, "model": "mixtral-8x7b", "layout": {"tp": 2, "ep": 4}},
    ],
    ids=str,
)
def test_the_account_is_the_estimates(show, changes: dict) -> None:
    shown = show("zero", **changes)
    ledger = by_category(ullage.estimate(shown.job).ledger)
    held: dict[str, int] = {}
    for category, _, _, size in shown.part("In the account").rows:
        held[category] = held.get(category, 0) + size
    assert held == {
        name: ledger[name] for name in ("parameters", "gradients", "optimizer", "gathered") if name in ledger
    }


def test_a_pipeline_gathers_once(show) -> None:
    shown = show("zero", stack="torchtitan", engine={"name": "fsdp2"}, layout={"pp": 2})
    assert "once a step" in shown.part("Forward: gather").about
    assert set(shown.part("Forward: gather").column("count")) == {1, 16}
    assert shown.part("Backward: nothing is gathered")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"engine": {"name": "ddp"}}, "engine.name = ddp"),
        ({"base": MEGATRON, "engine": {"name": "megatron"}}, "engine.zero_stage = 0"),
        ({"base": MEGATRON, "layout": {"tp": 8}}, "layout.dp = 1"),
    ],
)
def test_a_job_without_it(show, changes: dict, key: str) -> None:
    with pytest.raises(ullage.InvalidInput, match=key):
        show("zero", **changes)
