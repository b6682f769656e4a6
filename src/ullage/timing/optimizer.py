"""Seconds of the optimizer's step on one rank, clipping with it: all of it is bytes moved."""

from __future__ import annotations

from ullage import dtypes
from ullage.engines.fsdp2.shapes import shard_count
from ullage.engines.optimizer import MOMENTS
from ullage.job.job import Job
from ullage.timing import offload
from ullage.timing.machine import moved_s
from ullage.timing.states import Holds, is_sharded

STATE = {"8bit": "int8"}


def optimizer_s(job: Job, rank: Holds) -> float:
    """States read and written once by a fused kernel, gradients read; clipping reads them twice more and writes them."""
    if offload.is_hosted(job):
        return offload.optimizer_s(job, stepped(job, rank))
    return moved_s(job.cluster.device, stepped(job, rank) * _bytes_moved(job), "optimizer")


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
    moments = len(MOMENTS.get(optimizer.name, ("momentum",)))
    state = moments * dtypes.bits(STATE.get(optimizer.state, optimizer.state)) / 8
    copied = dtypes.bits(precision.params) / 8 if precision.params != precision.master else 0.0
    once = gradient + 2 * master + 2 * state + copied
    if optimizer.impl != "fused":
        once += offload.EAGER_PASSES * master
    return once + (3 * gradient if job.grad_clip else 0.0)
