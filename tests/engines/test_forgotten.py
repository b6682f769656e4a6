"""A process of many jobs forgets blocks' programs and allocations one by one; what it makes anew goes with what it has kept."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines import registry
from ullage.engines.registry import account, ranks_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.memory import chunk
from ullage.memory.reserved import simulate

DEEPSPEED = [{"engine": {"name": "deepspeed", "zero_stage": stage}} for stage in (1, 2, 3)]
ACCUMULATING = {"data": {"seq_len": 512, "grad_accum": 2}}
JOBS: list[dict[str, Any]] = [
    *DEEPSPEED,
    *({**job, **ACCUMULATING} for job in DEEPSPEED),
    *({**job, "recompute": {"layers": 2}} for job in DEEPSPEED),
    {"engine": {"name": "fsdp2"}, **ACCUMULATING},
    {"engine": {"name": "ddp"}, "recompute": "full"},
]


def plays(changes: dict[str, Any]) -> bool:
    """Whether a run frees only what it has allocated: the allocator's replay raises AssertionError otherwise."""
    job = read_job(
        {
            "model": {"base": "llama-2-7b", "num_hidden_layers": 4},
            "cluster": "8xA100-SXM-80GB",
            "precision": "fp16-mixed" if changes["engine"]["name"] == "deepspeed" else "bf16-mixed",
            "data": {"seq_len": 512},
            **changes,
        }
    )
    graph = graph_of(job)
    (rank,) = ranks_of(job, graph)
    return simulate(account(job, graph, rank).history).reserved_bytes > 0


@pytest.mark.parametrize("forgotten", ["_program", "_items_of", "_grouped"])
def test_what_is_made_anew_frees_what_was_kept(forgotten: str) -> None:
    for before in JOBS:
        plays(before)
        getattr(chunk, forgotten).cache_clear()
        registry.account.cache_clear()
        assert all(map(plays, JOBS)), (forgotten, before)
