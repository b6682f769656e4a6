"""What no expert does is lowered once for all expert parallelism: the steps are those of the whole context all the same."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels import lowering, stacks
from ullage.kernels.step import without_experts
from ullage.timing import ops

JOB = {"model": "qwen3-30b-a3b", "cluster": "2x8xH100-SXM-80GB", "data": {"seq_len": 4096, "micro_batch": 2}}
ENGINES = {"megatron": "megatron", "torchtitan": "fsdp2"}


@pytest.mark.parametrize("ep", [1, 4, 16])
@pytest.mark.parametrize("stack", list(ENGINES))
def test_steps_and_work_are_those_of_the_whole_context(stack: str, ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {"dp": 8, "tp": 2, "sp": True, "ep": ep}
    job = read_job(JOB | {"stack": stack, "engine": {"name": ENGINES[stack]}, "layout": layout, "precision": "bf16"})
    graph = graph_of(job)
    context = context_of(job, graph)
    assert without_experts(context) != context
    blocks = [run.block for run in graph.runs]
    shared = [(stacks.lower(block, context), ops.block_work(block, context)) for block in blocks]
    for cached in (stacks.lower, ops.block_work, ops._works_of):
        cached.cache_clear()
    monkeypatch.setattr(lowering, "without_experts", lambda whole: whole)
    monkeypatch.setattr(ops, "without_experts", lambda whole: whole)
    assert [(stacks.lower(block, context), ops.block_work(block, context)) for block in blocks] == shared
