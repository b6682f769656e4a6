"""Seconds of a step: parts that add up, and moves that can only cost."""

import pytest

from ullage.engines.base import context_of
from ullage.engines.registry import ranks_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.stage import Stage, send_s
from ullage.timing.step import stages, step_time

BASE = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "torchtitan",
    "engine": {"name": "fsdp2"},
    "data": {"seq_len": 4096, "micro_batch": 1},
}
MEGATRON = {
    "stack": "megatron",
    "engine": {"name": "megatron", "zero_stage": 1},
    "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
}


def timed(**changes):
    return step_time(read_job(BASE | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": "full"},
        {"engine": {"name": "ddp"}, "stack": "transformers"},
        {"engine": {"name": "deepspeed", "zero_stage": 2}, "stack": "transformers"},
        MEGATRON | {"layout": {"tp": 4, "sp": True, "pp": 2}, "data": {"seq_len": 4096, "micro_batch": 1, "grad_accum": 8}},
    ],
    ids=str,
)  # fmt: skip
def test_parts_add_up(changes: dict) -> None:
    found = timed(**changes)
    assert sum(seconds for _, seconds in found.parts) == pytest.approx(found.step_s)
    assert all(seconds > 0 for _, seconds in found.parts)
    assert 0 < found.mfu < 1


def test_an_axis_of_one_costs_nothing() -> None:
    parts = dict(timed(**MEGATRON, layout={"dp": 8}).parts)
    assert not {"tp", "cp", "ep", "bubble", "recompute"} & set(parts)


def test_recompute_costs_about_a_forward() -> None:
    plain, again = timed(), timed(recompute="full")
    assert 1.2 < again.step_s / plain.step_s < 1.4


def test_a_longer_sequence_takes_longer() -> None:
    short, long = timed(), timed(data={"seq_len": 8192, "micro_batch": 1})
    assert long.step_s > 1.8 * short.step_s  # gathers and what they take from matmuls stay as they are
    busy = [sum(dict(one.parts)[part] for part in ("matmul", "attention", "memory")) for one in (short, long)]
    assert busy[1] > 2 * busy[0]  # attention grows with the square


def test_more_micro_batches_fill_the_pipeline() -> None:
    layout = {"tp": 2, "sp": True, "pp": 4}
    few = timed(**MEGATRON | {"layout": layout, "data": {"seq_len": 4096, "micro_batch": 1, "grad_accum": 4}})
    many = timed(**MEGATRON | {"layout": layout, "data": {"seq_len": 4096, "micro_batch": 1, "grad_accum": 32}})
    assert many.bubble < few.bubble
    assert many.mfu > few.mfu


def test_an_interleaved_schedule_waits_for_what_it_does_not_overlap() -> None:
    """Each of the busiest rank's passes is then longer by a send; without chunks nothing was ever overlapped."""
    data = {"seq_len": 4096, "micro_batch": 1, "grad_accum": 16}
    layout = {"dp": 4, "pp": 2, "vpp": 4, "schedule": "interleaved-1f1b"}
    waiting = {"engine": MEGATRON["engine"] | {"options": {"overlap_p2p_comm": False}}}
    overlapped, waits = (timed(**MEGATRON | more, layout=layout, data=data) for more in ({}, waiting))
    job = read_job(BASE | MEGATRON | {"layout": layout, "data": data})
    sent = send_s(job, context_of(job, graph_of(job)))
    more = waits.step_s - overlapped.step_s
    assert 0.8 * 2 * 4 * 16 * sent < more < 1.2 * 2 * 4 * 16 * sent
    plain = {"dp": 4, "pp": 2}
    assert (
        timed(**MEGATRON | waiting, layout=plain, data=data).step_s == timed(**MEGATRON, layout=plain, data=data).step_s
    )


def test_a_slower_network_takes_longer() -> None:
    cluster = {"device": "H100-SXM-80GB", "gpus_per_node": 8, "nodes": 4, "inter": "400Gb/s-IB"}
    slow = cluster | {"inter": "25Gb/s"}
    job = {"model": "llama-3.1-70b", "data": {"seq_len": 1024, "micro_batch": 1}}
    assert timed(**job, cluster=slow).step_s > timed(**job, cluster=cluster).step_s


def test_what_is_not_known_is_said() -> None:
    device = {"memory": "80GiB"}
    with pytest.raises(Unsupported, match="has no known"):
        timed(cluster={"device": device, "gpus_per_node": 8})


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "sp": True, "pp": 4}, {"pp": 4, "vpp": 2, "schedule": "interleaved-1f1b"}], ids=str
)
def test_a_long_schedule_repeats_itself(layout: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"seq_len": 4096, "micro_batch": 1, "grad_accum": 64}
    extrapolated = timed(**MEGATRON, layout=layout, data=data).step_s
    step_time.cache_clear()
    monkeypatch.setattr("ullage.timing.step.WARM", 1000)
    assert timed(**MEGATRON, layout=layout, data=data).step_s == pytest.approx(extrapolated, rel=1e-6)
    step_time.cache_clear()


@pytest.mark.parametrize(
    "changes",
    [{"lora": {"rank": 8, "targets": "all-linear", "base": "int8"}}, {"offload": {"optimizer": "cpu"}}],
    ids=str,
)  # fmt: skip
def test_what_is_not_timed_is_refused(changes: dict) -> None:
    with pytest.raises(Unsupported, match="is not timed"):
        timed(**changes)


def test_equal_ranks_take_what_each_takes_by_itself() -> None:
    layout = {"tp": 1, "pp": 8, "dp": 1}
    job = read_job(BASE | MEGATRON | {"layout": layout, "data": {"seq_len": 4096, "micro_batch": 1, "grad_accum": 8}})
    graph = graph_of(job)
    found = stages(job, graph)
    alone = [Stage(job, graph, context_of(job, graph), rank) for rank in ranks_of(job, graph)]
    assert [one.rank for one in found] == [one.rank for one in alone]
    assert [(one.times, one.parts) for one in found] == [(one.times, one.parts) for one in alone]
