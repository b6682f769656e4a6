"""A block's seconds by its micro-batch, from one sequence and two, are those of the block itself."""

import pytest

from ullage.engines.base import context_of
from ullage.frozen import replace
from ullage.job.adapted import graph_of
from ullage.job.job import Loss
from ullage.job.read import read_job
from ullage.planner.costs import GridCosts
from ullage.planner.shapes import LeastCosts, ShapeCosts
from ullage.planner.space import FULL, NONE
from ullage.timing.blocks import pass_s
from ullage.timing.ops import block_work

JOB = {"model": "llama-3.1-8b", "cluster": "8xH100-SXM-80GB", "data": {"seq_len": 4096, "micro_batch": 1}}
TITAN = {"stack": "torchtitan", "engine": {"name": "fsdp2"}, "layout": {"dp": 2, "tp": 4, "sp": True}}
MEGATRON = {
    "stack": "megatron",
    "engine": {"name": "megatron"},
    "layout": {"dp": 2, "tp": 4, "sp": True},
    "precision": "bf16",
}


HYBRID = {
    "model_type": "nemotron_h",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*-E",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "moe_intermediate_size": 1024,
    "moe_shared_expert_intermediate_size": 2048,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    "changes",
    [TITAN, TITAN | {"compile": True}, MEGATRON, MEGATRON | {"model": HYBRID}],
    ids=["eager", "compiled", "megatron", "hybrid"],
)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7])
def test_it_grows_as_the_block_does(changes: dict, micro_batch: int) -> None:
    job = read_job(JOB | changes)
    graph = graph_of(job)
    costs = GridCosts(job, graph)
    larger = replace(job, data=replace(job.data, micro_batch=micro_batch))
    context = context_of(larger, graph)
    for block, (forward, backward) in zip(costs.kinds, costs.works, strict=True):
        work = block_work(block, context, costs.place.accumulates)
        exact = sum(pass_s(one.forward, costs.place, backward=False) for one in work)
        exact_back = sum(pass_s(one.backward, costs.place, backward=True) for one in work)
        assert forward.seconds(micro_batch) == pytest.approx(exact, rel=1e-6)
        assert backward.seconds(micro_batch) == pytest.approx(exact_back, rel=1e-6)


EXPERTS = MEGATRON | {"model": "qwen3-30b-a3b", "cluster": "4x8xH100-SXM-80GB", "layout": {"dp": 16, "tp": 2, "ep": 4}}


def test_experts_of_as_many_tokens_take_as_long_in_any_grid() -> None:
    """Grids that share what they know of their experts find what each finds by itself."""
    job = read_job(JOB | EXPERTS)
    graph = graph_of(job)
    shared: dict[object, float] = {}
    for cp, tp, ep, sp in (
        (1, 1, 4, False),
        (2, 1, 4, False),
        (4, 1, 4, False),
        (1, 2, 4, False),
        (1, 2, 4, True),
        (2, 2, 8, True),
    ):
        layout = replace(job.layout, dp=32 // (tp * cp), cp=cp, tp=tp, ep=ep, sp=sp)
        one = replace(job, layout=layout)
        together = GridCosts(one, graph, experts_s=shared)
        for micro_batch in (1, 2, 4, 8, 3):
            assert together.least_s(micro_batch) == GridCosts(one, graph).least_s(micro_batch)
    assert len(shared) < 6 * 5


def test_a_shape_whose_loss_is_open_is_no_more_than_under_any() -> None:
    job = read_job(JOB | MEGATRON)
    graph = graph_of(job)
    losses = (Loss(kind="vocab-parallel"), Loss(kind="vocab-parallel-fused"))
    first = GridCosts(replace(job, loss=losses[0]), graph)
    under = [ShapeCosts(one, one.job) for one in (first, GridCosts(replace(job, loss=losses[1]), graph, first))]
    least = LeastCosts(under)
    for kind in range(len(first.kinds)):
        assert least.blocks[kind].forward_s == min(one.blocks[kind].forward_s for one in under)
        assert least.blocks[kind].backward_s == min(one.blocks[kind].backward_s for one in under)
        for recompute in (NONE, FULL):
            assert least.kept(recompute)[kind] == min(one.kept(recompute)[kind] for one in under)
    assert least.whole_s < max(one.whole_s for one in under)


@pytest.mark.parametrize("seq_len", [24, 40, 56])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 9])
def test_rows_that_do_not_come_out_even_between_experts_are_never_too_many(seq_len: int, micro_batch: int) -> None:
    """One and a half rows of a sequence for an expert are one, of two sequences three, and of four six: not seven."""
    small = {"moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 1}
    model = {"base": "qwen3-30b-a3b", **small}
    layout = {"dp": 8, "ep": 1}
    job = read_job(JOB | EXPERTS | {"model": model, "layout": layout, "cluster": "8xH100-SXM-80GB"})
    job = replace(job, data=replace(job.data, seq_len=seq_len, micro_batch=1))
    graph = graph_of(job)
    costs = GridCosts(job, graph)
    context = context_of(replace(job, data=replace(job.data, micro_batch=micro_batch)), graph)
    for block, (forward, backward) in zip(costs.kinds, costs.works, strict=True):
        work = block_work(block, context, costs.place.accumulates)
        exact = sum(pass_s(one.forward, costs.place, backward=False) for one in work)
        exact_back = sum(pass_s(one.backward, costs.place, backward=True) for one in work)
        assert forward.seconds(micro_batch) <= exact * (1 + 1e-9)
        assert backward.seconds(micro_batch) <= exact_back * (1 + 1e-9)
