"""What is known of a change before it is estimated."""

import pytest

import ullage
from ullage.engines.estimate import rank_peak
from ullage.engines.registry import ranks_of
from ullage.job.adapted import graph_of
from ullage.postmortem.option import heaviest

STAGES = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "engine": {"name": "megatron", "zero_stage": 1},
    "stack": "megatron",
    "layout": {"pp": 8},
    "data": {"seq_len": 4096, "grad_accum": 16},
}
FSDP2 = ("engine.name=fsdp2", "engine.zero_stage=3", "stack=torchtitan")


@pytest.mark.parametrize(
    "changed",
    [
        (),
        ("recompute=full",),
        ("layout.schedule=gpipe",),
        ("layout.schedule=zb-h1",),
        ("layout.pp_split=[5,4,4,4,4,4,4,3]",),
        ("data.grad_accum=4",),
        ("model=llama-3.2-1b", "layout.pp=4", "layout.dp=2"),
        FSDP2,
        (*FSDP2, "recompute=full"),
    ],
)
def test_the_heaviest_of_all_ranks_is_among_those_looked_at(changed: tuple[str, ...]) -> None:
    job = ullage.read_job(STAGES, changed)
    graph = graph_of(job)
    looked_at, every = heaviest(job, graph), ranks_of(job, graph)
    assert max(rank_peak(job, graph, rank)[0] for rank in looked_at) == max(
        rank_peak(job, graph, rank)[0] for rank in every
    )
    assert (len(looked_at) < len(every)) == (job.layout.schedule != "zb-h1")
