"""A block's seconds by its micro-batch, from one sequence and two, are those of the block itself."""

import pytest

from ullage.engines.base import context_of
from ullage.frozen import replace
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.planner.costs import GridCosts
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


@pytest.mark.parametrize("changes", [TITAN, TITAN | {"compile": True}, MEGATRON], ids=["eager", "compiled", "megatron"])
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
