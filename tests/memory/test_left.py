"""What a forward leaves behind, told from one replay for many shapes, is what each shape's own replay leaves."""

from __future__ import annotations

import pytest

from ullage.engines.base import context_of
from ullage.frozen import replace
from ullage.job.adapted import graph_of
from ullage.job.job import Recompute
from ullage.job.read import read_job
from ullage.memory.left import left_bytes
from ullage.planner.costs import _kept_by, kinds
from ullage.planner.space import FULL, NONE, modules_of, of_modules, subsets

CLUSTER = "4x8xH100-SXM-80GB"
MEGATRON = {"stack": "megatron", "engine": {"name": "megatron"}, "precision": "bf16"}
JOBS = {
    "dense": ("llama-3.1-8b", MEGATRON),
    "sequence parallel": ("llama-3.1-8b", MEGATRON | {"layout": {"dp": 4, "tp": 4, "cp": 2, "sp": True}}),
    "experts": ("deepseek-v3", MEGATRON),
    "experts apart": ("deepseek-v3", MEGATRON | {"layout": {"dp": 16, "tp": 2, "ep": 8, "sp": True}}),
    "experts cut": ("mixtral-8x7b", MEGATRON | {"layout": {"dp": 16, "tp": 2, "ep": 4, "etp": 2}}),
    "torchtitan": ("llama-3.1-8b", {"stack": "torchtitan", "engine": {"name": "fsdp2"}}),
    "transformers": ("gpt2", {"engine": {"name": "ddp"}}),
    "fp32": ("gpt2", {"engine": {"name": "ddp"}, "precision": "fp32"}),
}


@pytest.mark.parametrize("name", list(JOBS))
def test_what_is_told_by_name_is_what_a_replay_leaves(name: str) -> None:
    model, changes = JOBS[name]
    document = {"model": model, "cluster": CLUSTER, "data": {"seq_len": 1000, "micro_batch": 1}}
    job = read_job(document | {"layout": {"dp": 32}} | changes)
    graph = graph_of(job)
    modules = modules_of(job, graph)
    sets = [of_modules(names) for names in subsets(modules.names, modules) if names][:24]
    for micro_batch in (1, 3):
        context = context_of(replace(job, data=replace(job.data, micro_batch=micro_batch)), graph)
        for block in kinds(graph):
            for recompute in (NONE, FULL, *sets) if block.role == "layer" else (NONE,):
                assert left_bytes(block, context, recompute) == _kept_by(block, context, recompute), recompute


def test_where_not_every_layer_is_recomputed_a_replay_has_to_say() -> None:
    job = read_job(
        {"model": "gpt2", "cluster": CLUSTER, "data": {"seq_len": 64, "micro_batch": 1}, "layout": {"dp": 32}}
    )
    graph = graph_of(job)
    assert left_bytes(kinds(graph)[1], context_of(job, graph), Recompute(kind="every", every=2)) is None
