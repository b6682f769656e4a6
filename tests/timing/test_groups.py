"""Which ranks an exchange joins."""

from __future__ import annotations

from ullage.job.read import read_job
from ullage.timing.machine import exchange_group

JOB = {
    "model": "mixtral-8x7b",
    "stack": "megatron",
    "data": {"seq_len": 1024, "micro_batch": 1},
}


def test_expert_parallel_ranks_are_neighbours_where_experts_are_whole() -> None:
    """Megatron-Core parallel_state.py: ranks of experts are ordered by their own tensor parallelism, then expert parallelism."""
    cluster = "2x8xH100-SXM-80GB"
    layout = {"dp": 8, "tp": 2, "sp": True, "ep": 8}
    engine = {"name": "megatron", "zero_stage": 1}
    whole = read_job(JOB | {"cluster": cluster, "layout": layout, "engine": engine})
    assert exchange_group(whole, "ep").domains == 1
    cut = read_job(JOB | {"cluster": cluster, "layout": layout | {"etp": 2}, "engine": engine})
    assert exchange_group(cut, "ep").domains == 2
