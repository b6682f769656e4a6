"""Reserved memory of a job: what only the allocator reads changes no tensor of it."""

from __future__ import annotations

import pytest

from ullage.engines.changes import changed
from ullage.engines.estimate import estimate, located
from ullage.engines.registry import ranks_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job

JOBS = {
    "single": {"model": "qwen3-0.6b", "cluster": "1xH100-SXM-80GB", "data": {"seq_len": 2048}},
    "fsdp2": {
        "model": "qwen3-0.6b",
        "cluster": "2xH100-SXM-80GB",
        "engine": {"name": "fsdp2"},
        "data": {"seq_len": 2048, "grad_accum": 3},
    },
    "graphs": {
        "model": "qwen3-0.6b",
        "cluster": "2xH100-SXM-80GB",
        "engine": {"name": "megatron", "options": {"cuda_graph_impl": "local"}},
        "stack": "megatron",
        "data": {"seq_len": 2048},
    },
}


@pytest.mark.parametrize("name", JOBS)
def test_segments_that_expand_change_no_tensor(name: str) -> None:
    job = read_job(JOBS[name])
    other = changed(job, {"engine.options.expandable_segments": True})
    assert other is not None
    graph = graph_of(job)
    (rank,) = ranks_of(job, graph)
    assert located(other, graph, rank) is not None
    assert located(other, graph, rank)[1] is located(job, graph, rank)[1]
    before, after = estimate(job), estimate(other)
    assert (before.peak.allocated_bytes, before.ledger) == (after.peak.allocated_bytes, after.ledger)
    assert before.peak.reserved_bytes != after.peak.reserved_bytes
    assert after.job is other
