"""What engines do to gradients beside matmuls and collectives, against counts by hand."""

import pytest

from ullage.job.read import read_job
from ullage.timing.gradients import (
    accumulated_bytes,
    accumulates,
    asynchronous,
    copied_in_bytes,
    copied_out_bytes,
    once_bytes,
)
from ullage.timing.step import step_time

MEGATRON = {
    "model": "llama-3.1-8b",
    "cluster": "8xA100-SXM-80GB",
    "stack": "megatron",
    "engine": {"name": "megatron", "options": {}},
    "layout": {"tp": 8},
    "precision": {"params": "bf16", "compute": "bf16", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
    "data": {"seq_len": 2048, "micro_batch": 1, "grad_accum": 4},
}
OF_2021 = {
    "engine": {"name": "megatron", "options": {"DDP_impl": "local"}},
    "precision": {"params": "fp16", "compute": "fp16", "grads": "fp16", "master": "fp32", "reduce": "fp16"},
}
DEEPSPEED = {"engine": {"name": "deepspeed", "zero_stage": 1, "options": {"bf16_optimizer": True}}}
SHARDED = {"engine": {"name": "fsdp2"}, "stack": "torchtitan", "layout": {"dp": 8}, "precision": "bf16-mixed"}


def job(**changes):
    return read_job(MEGATRON | changes)


def test_megatron_adds_inside_of_its_matmuls() -> None:
    assert accumulates(job())
    assert accumulated_bytes(job(), "bf16") == 0
    assert once_bytes(job()) == 4 + 4 + 8  # zeroed, looked at, scaled


def test_without_the_fusion_it_adds_beside_them() -> None:
    unfused = job(engine={"name": "megatron", "options": {"gradient_accumulation_fusion": False}})
    assert not accumulates(unfused)
    assert accumulated_bytes(unfused, "bf16") == 2 + 4 + 4
    assert accumulated_bytes(job(**DEEPSPEED), "bf16") == 2 + 4 + 4


def test_autograd_adds_from_the_second_micro_batch_on() -> None:
    assert accumulated_bytes(job(**OF_2021), "fp16") == 6 * 3 / 4
    once = job(**OF_2021, data={"seq_len": 2048, "micro_batch": 1})
    assert accumulated_bytes(once, "fp16") == 0


def test_fsdp2_copies_what_it_gathers_and_reduces() -> None:
    sharded = job(**SHARDED)
    assert copied_out_bytes(sharded, 2) == 4
    assert copied_in_bytes(sharded, "bf16") == 2 + 4  # reduced in fp32


@pytest.mark.parametrize("changes", [OF_2021, DEEPSPEED], ids=["2021", "deepspeed"])
def test_older_code_waits_for_its_all_reduces(changes: dict) -> None:
    assert asynchronous(job())
    assert not asynchronous(job(**changes))
    assert dict(step_time(job(**changes)).parts)["tp"] > 1.3 * dict(step_time(job()).parts)["tp"]


def test_pipeline_stages_send_a_part_from_each_rank() -> None:
    """Between nodes a tensor that all ranks of a tensor-parallel group hold is not sent eight times over."""
    data = {"seq_len": 2048, "micro_batch": 1, "grad_accum": 8}
    pipeline = job(cluster="2x8xA100-SXM-80GB", layout={"tp": 8, "pp": 2}, data=data)
    single = job(data=data)
    assert step_time(pipeline).step_s < 0.75 * step_time(single).step_s


def test_the_native_loss_moves_its_logits_many_times() -> None:
    native, fused = (
        dict(step_time(job(loss=loss)).parts)["memory"] for loss in ("vocab-parallel", "vocab-parallel-fused")
    )
    logits = 2048 * 128256 // 8 * 4  # of all micro-batches, on one rank
    saved = (38 + 14 - 26 - 6) * logits / (2.039e12 * 0.67)  # the share of an A100 by PCIe
    assert native - fused == pytest.approx(saved, rel=0.05)
