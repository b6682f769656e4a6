"""What ops are lowered with does not leave out what they depend on."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.frozen import replace
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.kernels import lowering, stacks
from ullage.kernels.step import Context

DEEPSEEK = {"base": "deepseek-v3", "num_hidden_layers": 4}
JOBS = {
    "megatron": {
        "model": DEEPSEEK,
        "cluster": "8xH100-SXM-80GB",
        "stack": "megatron",
        "engine": {"name": "megatron"},
        "layout": {"tp": 2, "sp": True, "ep": 4},
        "data": {"seq_len": 1024},
        "precision": "bf16",
    },
    "torchtitan": {
        "model": "llama-3.2-1b",
        "cluster": "8xH100-SXM-80GB",
        "stack": "torchtitan",
        "engine": {"name": "fsdp2"},
        "layout": {"tp": 2, "sp": True},
        "data": {"seq_len": 1024},
    },
}
LOSSES = {
    "megatron": ("vocab-parallel", "vocab-parallel-fused"),
    "torchtitan": ("full", "vocab-parallel", "chunked"),
}


@pytest.mark.parametrize("name", list(JOBS))
def test_ops_that_do_not_know_of_the_loss_are_lowered_as_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = read_job(JOBS[name])
    graph = graph_of(job)
    blocks = list(dict.fromkeys(run.block for run in graph.runs))
    contexts = [replace(context_of(job, graph), loss=loss) for loss in LOSSES[name]]
    without = [[stacks.lower(block, context) for block in blocks] for context in contexts]
    assert without[0] != without[1]

    def itself(context: Context) -> Context:
        return context

    monkeypatch.setattr(lowering, "without_loss", itself)
    monkeypatch.setattr(lowering, "without_experts", itself)
    lowering._lowered.cache_clear()
    stacks.lower.cache_clear()
    assert without == [[stacks.lower(block, context) for block in blocks] for context in contexts]
