"""What a rank sends in a step: the exchanges that its seconds are made of, and how often an engine sends them."""

import pytest

from ullage.job.read import read_job
from ullage.model.build import graph as build
from ullage.timing.step import stages
from ullage.timing.transfers import transfers

BASE = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "data": {"seq_len": 2048, "micro_batch": 1, "grad_accum": 4},
}
ONE = {"seq_len": 2048, "micro_batch": 1, "grad_accum": 1}
MEGATRON = {"stack": "megatron", "engine": {"name": "megatron", "zero_stage": 1}, "recompute": "full"}


def sent(index: int = 0, **changes):
    job = read_job(BASE | changes)
    stage = stages(job, build(job.model, mtp=job.engine.name == "megatron"))[index]
    return stage, transfers(stage)


def counts(found) -> dict[tuple[str, str], int]:
    totals: dict[tuple[str, str], int] = {}
    for one in found:
        key = (one.phase, one.exchange.kind)
        totals[key] = totals.get(key, 0) + one.count
    return totals


@pytest.mark.parametrize("layout", [{"tp": 4, "sp": True}, {"tp": 2, "pp": 2}, {"tp": 8}], ids=str)
@pytest.mark.parametrize("index", [0, -1])
def test_waits_are_those_of_the_time(layout: dict, index: int) -> None:
    stage, found = sent(index, **MEGATRON, layout=layout)
    parts = dict(stage.parts.items)
    for axis in ("tp", "dp"):
        timed = [
            one for one in found if one.exchange.axis == axis and one.phase != "recompute" and one.wait_s is not None
        ]
        waits = sum(one.count * one.wait_s for one in timed)
        assert waits == pytest.approx(parts.get(axis, 0.0))


def test_shards_are_waited_for_no_longer_than_they_take() -> None:
    stage, found = sent(engine={"name": "fsdp2"}, stack="torchtitan")
    assert 0 < dict(stage.parts.items)["shard"] < sum(one.sent_s for one in found)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # 32 layers and the root, which is gathered once for both passes; gradients in every micro-batch, or the last under no_sync
        (
            {"stack": "transformers", "engine": {"name": "fsdp2"}},
            {("forward", "all_gather"): 4 * 34, ("backward", "all_gather"): 4 * 32, ("backward", "reduce_scatter"): 34},
        ),
        (
            {"stack": "torchtitan", "engine": {"name": "fsdp2"}},
            {("forward", "all_gather"): 4 * 34, ("backward", "all_gather"): 4 * 33, ("backward", "reduce_scatter"): 4 * 34},
        ),
        (
            {"stack": "torchtitan", "engine": {"name": "fsdp2"}, "layout": {"pp": 2}},
            {("forward", "all_gather"): 17, ("backward", "reduce_scatter"): 17, ("forward", "send"): 4},
        ),
        (
            {"stack": "transformers", "engine": {"name": "deepspeed", "zero_stage": 1}},
            {("backward", "reduce_scatter"): 1, ("step", "all_gather"): 1},
        ),
        (
            {"stack": "transformers", "engine": {"name": "deepspeed", "zero_stage": 2}},
            {("backward", "reduce_scatter"): 4, ("step", "all_gather"): 1},
        ),
        ({"stack": "transformers", "engine": {"name": "ddp"}}, {("backward", "all_reduce"): 1}),
        # along the sequence attention, MLP and head gather their input once, and keep it; logits are gathered
        (
            {"stack": "transformers", "engine": {"name": "fsdp2"}, "layout": {"tp": 8, "sp": True}, "data": ONE},
            {
                ("forward", "all_reduce"): 1, ("forward", "all_gather"): 2 * 32 + 2, ("forward", "reduce_scatter"): 2 * 32,
                ("backward", "all_gather"): 2 * 32 + 1, ("backward", "reduce_scatter"): 2 * 32 + 1,
            },
        ),
    ],
    ids=str,
)  # fmt: skip
def test_an_engine_sends_as_often_as_it_does(changes: dict, expected: dict) -> None:
    assert counts(sent(**changes)[1]) == expected


def test_a_hybrid_shard_group_reduces_twice() -> None:
    engine = {"name": "fsdp2", "shard_group": 4}
    found = [one for one in sent(engine=engine, stack="torchtitan")[1] if one.what == "gradients"]
    groups = {one.exchange.kind: one.group.ranks for one in found}
    assert groups == {"reduce_scatter": 4, "all_reduce": 2}
    layer = {one.exchange.kind: one.exchange.payload_bytes for one in found if one.block == "layer"}
    assert layer["reduce_scatter"] == 4 * layer["all_reduce"]


def test_experts_are_sharded_over_what_expert_parallelism_leaves() -> None:
    _, found = sent(model="mixtral-8x7b", layout={"dp": 8, "ep": 4}, stack="torchtitan", engine={"name": "fsdp2"})
    groups = {one.exchange.axis: one.group.ranks for one in found if one.what == "gradients"}
    assert groups == {"shard": 8, "expert_shard": 2}


@pytest.mark.parametrize(("tp", "masked"), [(2, True), (2, False), (1, True)])
def test_one_rank_reads_a_batch_and_the_others_wait_for_it(tp: int, masked: bool) -> None:
    """Megatron-LM megatron/training/utils.py, get_batch_on_this_tp_rank: ids, labels and positions of 8 bytes a token, the labels' mask of
    4, and the mask of attention, a byte for each pair, unless told to make none."""
    options = {} if masked else {"create_attention_mask_in_dataloader": False}
    engine = MEGATRON["engine"] | {"options": options}
    _, found = sent(stack="megatron", engine=engine, layout={"tp": tp})
    of_each_micro_batch = ((one.exchange, one.count // 4) for one in found)
    read = sorted(
        one.payload_bytes for one, count in of_each_micro_batch if one.kind == "broadcast" for _ in range(count)
    )
    tokens = 2048
    mask = [tokens * tokens] if masked else []
    assert read == ([] if tp == 1 else [4 * tokens, 8 * tokens, 8 * tokens, 8 * tokens, *mask])
