"""States and activations on the host: what is copied, what steps there, and what of it a step waits for."""

from dataclasses import replace

import pytest

from ullage.calibration.host import (
    host_bytes_per_s,
    host_optimizer_bytes_per_s,
    nvme_bytes_per_s,
    thread_elements_per_s,
)
from ullage.errors import Unsupported
from ullage.hardware.catalogue import device
from ullage.job.read import read_job
from ullage.model.build import graph
from ullage.timing.step import stages, step_time

DATA = {"seq_len": 4096, "micro_batch": 1}
FSDP2 = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "torchtitan",
    "engine": {"name": "fsdp2"},
    "data": DATA,
    "precision": "bf16",
    "grad_clip": False,
    "offload": {"optimizer": "cpu", "params": "cpu"},
}
GPU = device("H100-SXM-80GB")


def deepspeed(
    stage: int, *, params: str = "none", optimizer: str = "cpu", grad_accum: int = 1, **options: object
) -> dict:
    return {
        "model": "llama-3.1-8b",
        "cluster": "8xH100-SXM-80GB",
        "engine": {"name": "deepspeed", "zero_stage": stage, "options": options},
        "data": DATA | {"grad_accum": grad_accum},
        "precision": "bf16-mixed",
        "offload": {"optimizer": optimizer, "params": params},
    }


def timed(job: dict):
    return step_time(read_job(job))


def parts(job: dict) -> dict[str, float]:
    return dict(timed(job).parts)


def numel(job: dict) -> int:
    read = read_job(job)
    (stage,) = stages(read, graph(read.model))
    return stage.rank.numel(expert=False)


@pytest.mark.parametrize(
    "job",
    [
        FSDP2,
        FSDP2 | {"data": DATA | {"grad_accum": 4}},
        deepspeed(1),
        deepspeed(2, grad_accum=4),
        deepspeed(3),
        deepspeed(3, params="cpu"),
        deepspeed(3, params="nvme", optimizer="nvme"),
    ],
    ids=str,
)
def test_parts_add_up(job: dict) -> None:
    found, plain = timed(job), timed(job | {"offload": {}})
    assert sum(seconds for _, seconds in found.parts) == pytest.approx(found.step_s)
    assert all(seconds > 0 for _, seconds in found.parts)
    assert dict(found.parts)["offload"] + dict(found.parts)["optimizer"] - dict(plain.parts)[
        "optimizer"
    ] == pytest.approx(found.step_s - plain.step_s)


def test_cpu_adam_is_bound_by_the_memory_of_the_node() -> None:
    """DeepSpeedCPUAdam: fp32 gradients, masters and moments, clipping, and the cast to 16 bits, of the whole model on one node."""
    job = deepspeed(2)
    moved = (4 + 2 * 4 + 2 * 2 * 4) + 2 * 4 + (4 + 2)
    rate = host_optimizer_bytes_per_s(GPU, "fused", 8).value
    assert parts(job)["optimizer"] == pytest.approx(numel(job) * moved / rate)
    assert parts(deepspeed(3))["optimizer"] == pytest.approx(parts(job)["optimizer"], rel=1e-3)


def test_torchrun_gives_each_of_several_ranks_one_thread() -> None:
    many, one = FSDP2, FSDP2 | {"cluster": "1xH100-SXM-80GB"}
    assert parts(many)["optimizer"] == pytest.approx(numel(many) / 8 / thread_elements_per_s("fused").value)
    rate = host_optimizer_bytes_per_s(GPU, "fused", 1).value
    assert parts(one)["optimizer"] == pytest.approx(numel(one) * 14 / rate)


def test_gradients_on_their_way_are_waited_for_unless_a_stream_carries_them() -> None:
    n_bytes = numel(deepspeed(2)) / 8 * 4
    d2h, h2d = (host_bytes_per_s(GPU, direction).value for direction in ("d2h", "h2d"))
    returned = n_bytes / 2 / h2d
    assert parts(deepspeed(2))["offload"] == pytest.approx(n_bytes / d2h + returned)
    assert parts(deepspeed(2, overlap_comm=True))["offload"] == pytest.approx(returned)
    assert parts(deepspeed(2, overlap_comm=True, pin_memory=False))["offload"] > 5 * (n_bytes / d2h + returned)


def test_accumulated_gradients_go_there_and_back() -> None:
    """Of 4 micro-batches, each to the host in 16 bits, three back to be added to; the last in fp32 too."""
    shard = numel(deepspeed(2)) / 8
    d2h, h2d = (host_bytes_per_s(GPU, direction).value for direction in ("d2h", "h2d"))
    expected = shard * ((4 * 2 + 4) / d2h + 3 * 2 / h2d + 2 / h2d)
    assert parts(deepspeed(2, grad_accum=4))["offload"] == pytest.approx(expected)


def test_stage_1_moves_gradients_once_and_stage_3_in_every_micro_batch() -> None:
    stage_1, stage_2, stage_3 = (
        parts(deepspeed(stage, grad_accum=8, overlap_comm=False))["offload"] for stage in (1, 2, 3)
    )
    assert stage_1 < 0.3 * stage_2 < 0.3 * stage_3


def test_parameters_from_nvme_cost_more_than_from_memory() -> None:
    memory, nvme = parts(deepspeed(3, params="cpu")), parts(deepspeed(3, params="nvme"))
    swapped = parts(deepspeed(3, params="cpu", optimizer="nvme"))
    assert nvme["offload"] > memory["offload"]
    moved = numel(deepspeed(3)) * (4 + 4 + 8)
    more = moved / nvme_bytes_per_s(8).value + moved / nvme_bytes_per_s(8, write=True).value
    assert swapped["optimizer"] == pytest.approx(memory["optimizer"] + more, rel=1e-3)


def test_longer_sequences_hide_the_copies_of_fsdp2() -> None:
    short, long = (parts(FSDP2 | {"data": {"seq_len": length, "micro_batch": 1}}) for length in (512, 16384))
    assert long["offload"] < 0.5 * short["offload"]


@pytest.mark.parametrize(("host_link", "waits"), [(31e9, False), (1e9, True)])
def test_activations_are_copied_beside_computing(host_link: float, waits: bool) -> None:
    document = {
        "model": "llama-3.2-3b",
        "cluster": "1xA100-SXM-80GB",
        "engine": {"name": "single"},
        "data": DATA,
        "precision": "bf16",
        "recompute": "full",
        "offload": {"activations": "cpu"},
    }
    job = read_job(document)
    a100 = replace(job.cluster.device, name="A100 by another link", host_link_bytes_per_s=host_link)
    copied = step_time(replace(job, cluster=replace(job.cluster, device=a100)))
    assert ("offload" in dict(copied.parts)) is waits
    assert "offload" not in parts(document | {"offload": {}})


def test_who_steps_states_on_the_host_is_known() -> None:
    with pytest.raises(Unsupported, match="is not timed under engine fsdp2"):
        timed(FSDP2 | {"offload": {"optimizer": "cpu"}})


def paged(optimizer: str, gpu: str) -> float:
    job = {
        "model": "llama-3.1-8b",
        "cluster": f"1x{gpu}",
        "stack": "torchtune",
        "engine": {"name": "single", "options": {"optimizer_in_bwd": True}},
        "data": {"seq_len": 2048, "micro_batch": 2},
        "precision": "bf16",
        "optimizer": optimizer,
        "grad_clip": False,
        "recompute": "full",
    }
    return parts(job)["optimizer"]


def test_paged_states_without_room_come_and_go_once_a_step() -> None:
    """Two 8-bit moments of 8.03e9 elements beside 16 GB of parameters: more than 24 GB, which bitsandbytes fetches tensor by tensor
    (optim/optimizer.py, prefetch_state). On 80 GB they stay."""
    more = paged("paged-adamw-8bit", "RTX-4090-24GB") - paged("adamw-8bit", "RTX-4090-24GB")
    both_ways = host_bytes_per_s(device("RTX-4090-24GB"), "h2d", both=True).value
    assert more == pytest.approx(2 * 8_030_261_248 / both_ways)
    assert paged("paged-adamw-8bit", "A100-SXM-80GB") == paged("adamw-8bit", "A100-SXM-80GB")
