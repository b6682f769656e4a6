"""Host memory of one rank under offload. Source: runtime/zero/stage_1_and_2.py, stage3.py, ops/adam/cpu_adam.py."""

from __future__ import annotations

from ullage.engines.base import pinned
from ullage.engines.deepspeed.options import Knobs, version_of
from ullage.engines.deepspeed.partition import Held
from ullage.engines.deepspeed.states import bytes_of
from ullage.job.job import Job

_PINNED = (0, 17, 0)  # pin_memory is the default from here on


def host_bytes(job: Job, held: Held, knobs: Knobs) -> int:
    """Masters, their gradients and moments; stages 1 and 2 stage 16-bit gradients, accumulate them, and keep a temporary."""
    if job.offload.optimizer != "cpu":
        return 0
    share = held.partition
    optimizer = [bytes_of(share, knobs.master), bytes_of(share, knobs.master)]  # masters and their gradients
    moments = 2 * bytes_of(share, knobs.state) if job.optimizer.name.startswith("adam") else 0
    staged = [bytes_of(share, knobs.grads)]
    if job.engine.zero_stage < 3:
        staged.append(2 * bytes_of(max(held.numels, default=0), knobs.grads) // 2)
        if job.data.grad_accum > 1:
            staged.append(bytes_of(max(_owned(held), share), knobs.grads))
    elif job.offload.params == "cpu":
        staged.append(bytes_of(share, job.precision.params))
    return sum(pinned(size) if pins(job) else size for size in [*optimizer, *staged]) + moments


def pins(job: Job) -> bool:
    """Whether what waits on the host does so in page-locked memory."""
    return bool(job.engine.options.get("pin_memory", version_of(job) >= _PINNED))


def _owned(held: Held) -> int:
    return max(
        (sum(flat.own(index % flat.shards).whole for _, flat in held.flats) for index in range(_most(held))), default=0
    )


def _most(held: Held) -> int:
    return max((flat.shards for _, flat in held.flats), default=0)
