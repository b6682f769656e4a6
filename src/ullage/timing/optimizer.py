"""Seconds of the optimizer's step on one rank, clipping with it: all of it is bytes moved."""

from __future__ import annotations

from ullage import dtypes
from ullage.calibration.host import host_bytes_per_s
from ullage.engines.base import flag
from ullage.engines.fsdp2.shapes import shard_count
from ullage.engines.optimizer import MOMENTS
from ullage.job.job import Job
from ullage.timing import offload
from ullage.timing.machine import moved_s
from ullage.timing.partly import of_adapters
from ullage.timing.states import Holds, is_sharded

STATE = {"8bit": "int8"}


def optimizer_s(job: Job, rank: Holds) -> float:
    """States read and written once by a fused kernel, gradients read; clipping reads them twice more and writes them."""
    job, numel = of_adapters(job), stepped(job, rank)
    here = numel * (1.0 - offload.share(job)) * _bytes_moved(job)
    beside = offload.optimizer_s(job, numel) if offload.is_hosted(job) else 0.0
    return max(beside, moved_s(job.cluster.device, here, "optimizer")) + _paged_s(job, numel)


def _paged_s(job: Job, numel: float) -> float:
    """States in managed memory that have no room beside the parameters that they are of. bitsandbytes fetches each tensor's before its step
    and waits for the step (optim/optimizer.py, prefetch_state); what was longest untouched makes room, so that in a cycle that does not fit
    all of it comes and goes, both ways at once."""
    states = numel * _state_bytes(job)
    room = job.cluster.device.capacity_bytes - numel * dtypes.bits(job.precision.params) / 8
    if not job.optimizer.paged or states <= room:
        return 0.0
    return states / min(host_bytes_per_s(job.cluster.device, way, both=True).value for way in ("h2d", "d2h"))


def stepped(job: Job, rank: Holds) -> float:
    """Elements that the rank steps."""
    numel = 0.0
    for expert in (False, True):
        owners = job.layout.expert_dp if expert else job.layout.dp * job.layout.cp
        shards = shard_count(job, expert=expert) if is_sharded(job) else owners
        numel += rank.numel(expert=expert) / (shards if job.engine.zero_stage else 1)
    return numel


def _bytes_moved(job: Job) -> float:
    """Of one element."""
    precision, optimizer = job.precision, job.optimizer
    master = dtypes.bits(precision.master or precision.params) / 8
    gradient = dtypes.bits(precision.grads) / 8
    once = gradient + 2 * master + 2 * _state_bytes(job) + _copied_bytes(job)
    if optimizer.impl != "fused":
        once += offload.EAGER_PASSES * master
    return once + (3 * gradient if job.grad_clip else 0.0)


def _copied_bytes(job: Job) -> float:
    """Of one element whose master is of another type: read once more, and its parameter written, after the step (Megatron-Core
    optimizer/distrib_optimizer.py, _copy_main_params_to_model_params; DeepSpeed runtime/zero/stage_1_and_2.py, bit16_partitions), but for
    Megatron's precision-aware optimizer, which writes both."""
    precision = job.precision
    if precision.master in (None, precision.params):
        return 0.0
    written = dtypes.bits(precision.params) / 8
    at_once = flag(job.engine.options, "use_precision_aware_optimizer", False)
    return written if at_once else written + dtypes.bits(precision.master) / 8


def _state_bytes(job: Job) -> float:
    """Of one element, all moments."""
    optimizer = job.optimizer
    return (
        len(MOMENTS.get(optimizer.name, ("momentum",))) * dtypes.bits(STATE.get(optimizer.state, optimizer.state)) / 8
    )
