"""What is said to have no room against the interval that a plan is judged by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.planner.following import followed, following
from tests.planner.test_bounds import space

from ullage.engines.estimate import estimate, rank_peak
from ullage.engines.interval import KINDS, Interval, demand, interval, kind
from ullage.engines.registry import account, ranks_of
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.memory.overhead import outside_allocator
from ullage.planner.bounds import MemoryBound

DENSE: dict[str, Any] = {
    "model": {"base": "llama-3.1-8b", "num_hidden_layers": 2}, "cluster": "8xH100-SXM-80GB", "data": {"seq_len": 1024},
}  # fmt: skip
EXPERTS = {"model": {"base": "mixtral-8x7b", "num_hidden_layers": 2}}
MEGATRON: dict[str, Any] = {"engine": {"name": "megatron", "zero_stage": 1}, "stack": "megatron"}
JOBS: dict[str, dict[str, Any]] = {
    "model": {"engine": {"name": "fsdp2"}},
    "megatron": MEGATRON,
    "option": {**MEGATRON, "engine": {**MEGATRON["engine"], "options": {"fp8_recipe": "tensorwise"}}},
    "compile": {"engine": {"name": "fsdp2"}, "stack": "torchtitan", "compile": True},
    "routing": MEGATRON | EXPERTS,
    "experts": {"engine": {"name": "fsdp2"}, **EXPERTS},
    "texts": {"engine": {"name": "ddp"}, "stack": "transformers"},
    "fork": {"engine": {"name": "deepspeed", "zero_stage": 1}, "stack": "megatron"},
}
SURE = ("routing", "experts", "compile", "fork")
"""Kinds that no warning of an account changes."""


def _bracket(job: Job, allocated_bytes: int) -> Interval:
    graph = graph_of(job)
    found = account(job, graph, ranks_of(job, graph)[0])
    outside = outside_allocator(job.cluster, found.groups, eager=found.eager)
    return interval(job, found, allocated_bytes, outside)


@pytest.mark.parametrize("name", list(KINDS))
def test_what_has_no_room_does_not_fit(name: str) -> None:
    job = read_job({**DENSE, **JOBS[name]})
    graph = graph_of(job)
    assert kind(job, account(job, graph, ranks_of(job, graph)[0])) == name
    assert _bracket(job, MemoryBound(job).room_bytes + 1).high_bytes >= job.cluster.device.capacity_bytes


@pytest.mark.parametrize("name", list(KINDS))
def test_what_has_no_room_is_not_even_tight(name: str) -> None:
    job = read_job({**DENSE, **JOBS[name]})
    room_bytes = MemoryBound(job, tight=True).room_bytes
    assert room_bytes > MemoryBound(job).room_bytes
    assert _bracket(job, room_bytes + 1).low_bytes >= job.cluster.device.capacity_bytes


def test_checkpoints_that_may_be_on_the_host_leave_room() -> None:
    """What a low estimate leaves out of the account is not known before it: nothing is left out by it."""
    fork = JOBS["fork"]
    job = read_job({**DENSE, **fork, "engine": {**fork["engine"], "options": {"split_transformers": True}}})
    assert MemoryBound(job, tight=True).room_bytes > 1000 * job.cluster.device.capacity_bytes


@pytest.mark.parametrize("name", SURE)
def test_no_more_room_is_left_out_than_the_spread_takes(name: str) -> None:
    """A hundredth less fits, but for what communicators take."""
    job = read_job({**DENSE, **JOBS[name]})
    graph = graph_of(job)
    found = account(job, graph, ranks_of(job, graph)[0])
    communicators = sum(one.high_bytes for one in outside_allocator(job.cluster, found.groups)[1:])
    high_bytes = _bracket(job, int(MemoryBound(job).room_bytes * 0.99)).high_bytes
    assert high_bytes - communicators < job.cluster.device.capacity_bytes


@pytest.mark.parametrize(("name", "engine"), [("llama", "megatron"), ("qwen3", "megatron"), ("llama", "fsdp2")])
def test_the_high_end_is_no_less_than_what_any_rank_allocates_with_its_spread(name: str, engine: str) -> None:
    for one in followed(following(space(name), engine, seed=11, exhaustive=True), 4):
        graph = one.strategy.base.graph
        job = replace(one.strategy.job, recompute=one.strategy.family.kinds[one.at])
        most = max(rank_peak(job, graph, rank)[0] for rank in ranks_of(job, graph))
        assert estimate(job, graph).peak.high_bytes >= int(most * demand(job).share)
