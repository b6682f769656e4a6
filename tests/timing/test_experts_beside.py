"""What goes to experts beside another micro-batch's pass (Megatron-Core pipeline_parallel/combined_1f1b.py)."""

from __future__ import annotations

from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.timing.blocks import BlockTime, block_time
from ullage.timing.machine import sent_s
from ullage.timing.ops import block_work
from ullage.timing.stage import Stage
from ullage.timing.step import stages

JOB = {
    "model": "qwen3-30b-a3b",
    "stack": "megatron",
    "layout": {"dp": 16, "ep": 8},
    "data": {"seq_len": 4096, "micro_batch": 1, "grad_accum": 4},
}


def _job(gpus: str, hides: bool, **data: object) -> Job:
    options = {"overlap_moe_expert_parallel_comm": hides}
    engine = {"name": "megatron", "zero_stage": 1, "options": options}
    return read_job(JOB | {"cluster": gpus, "engine": engine, "data": JOB["data"] | data})  # type: ignore[operator]


def _layer(job: Job) -> tuple[Stage, BlockTime, float]:
    """A layer's time, and what it sends to experts and back, by itself."""
    stage = stages(job, graph_of(job))[0]
    element = next(one for one in stage.elements[0] if one.block.role == "layer")
    work = block_work(element.block, stage.context, stage.place.accumulates)
    sent = (one for each in work for way in (each.forward, each.backward) for one in way.exchanges if one.axis == "ep")
    wire_s = sum(sent_s(job.cluster, job.layout, one) for one in sent)
    return stage, block_time(element.block, stage.context, stage.place, element.mode, job.recompute), wire_s


NODES, CARDS = "2x8xH100-SXM-80GB", "16x1xH100-SXM-80GB"


def test_a_short_exchange_costs_what_matmuls_lose_to_it() -> None:
    _, waits, wire_s = _layer(_job(NODES, hides=False))
    _, beside, _ = _layer(_job(NODES, hides=True))
    waited_s, left_s = (one.forward.of("ep") + one.backward.of("ep") for one in (waits, beside))
    assert waited_s > 0.99 * wire_s
    assert 0 < left_s < waited_s


def test_a_long_exchange_hides_all_that_is_computed() -> None:
    _, beside, wire_s = _layer(_job(CARDS, hides=True))
    _, waits, _ = _layer(_job(CARDS, hides=False))
    computed_s = waits.forward.total_s + waits.backward_s - wire_s
    assert wire_s > 2 * computed_s  # so that what matmuls lose is hidden too
    assert abs(beside.forward.total_s + beside.backward_s - wire_s) < 1e-6 * wire_s


def test_a_step_of_one_micro_batch_has_no_other_pass() -> None:
    stage, _, _ = _layer(_job(NODES, hides=True, grad_accum=1))
    assert not stage.place.hides_experts
