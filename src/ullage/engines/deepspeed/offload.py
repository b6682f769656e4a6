"""Host memory of one rank under offload.

Sources: runtime/zero/stage_1_and_2.py, stage3.py, ops/adam/cpu_adam.py; of NVMe runtime/swap_tensor.
"""

from __future__ import annotations

from ullage.engines.base import pinned
from ullage.engines.deepspeed import stage3
from ullage.engines.deepspeed.options import Knobs, version_of
from ullage.engines.deepspeed.partition import Held, data_parallel
from ullage.engines.deepspeed.states import bytes_of
from ullage.job.job import Job
from ullage.units import KIB

# runtime/zero/offload_config.py
_OPTIMIZER_BUFFERS = 4
_PARAM_BUFFERS = 5
_PARAM_BUFFER = 100_000_000
_MOST_IN_CPU = 10 * _PARAM_BUFFER
_AIO_ALIGNED = KIB
_PINNED = (0, 17, 0)  # pin_memory is the default from here on


def host_bytes(job: Job, held: Held, knobs: Knobs) -> int:
    return _optimizer(job, held, knobs) + parameters_bytes(job, held, knobs)


def _optimizer(job: Job, held: Held, knobs: Knobs) -> int:
    """Masters, their gradients and moments; stages 1 and 2 stage 16-bit gradients, accumulate them, and keep a temporary. With NVMe they
    are in files, and the sub-group that is stepped is in buffers of the largest one's size."""
    if job.offload.optimizer == "none":
        return 0
    share = held.partition
    gradients = bytes_of(share, knobs.grads)
    if job.offload.optimizer == "nvme":
        groups = stage3.stepped_sizes(held, knobs)
        buffers = _OPTIMIZER_BUFFERS * _aligned(bytes_of(max(groups, default=0), knobs.master))
        return buffers + (pinned(gradients) if pins(job) else gradients)
    optimizer = [bytes_of(share, knobs.master), bytes_of(share, knobs.master)]  # masters and their gradients
    moments = 2 * bytes_of(share, knobs.state) if job.optimizer.name.startswith("adam") else 0
    staged = [gradients]
    if job.engine.zero_stage < 3:
        staged.append(2 * bytes_of(max(held.numels, default=0), knobs.grads) // 2)
        if job.data.grad_accum > 1:
            staged.append(bytes_of(max(_owned(held), share), knobs.grads))
    return sum(pinned(size) if pins(job) else size for size in [*optimizer, *staged]) + moments


def parameters_bytes(job: Job, held: Held, knobs: Knobs) -> int:
    """One buffer of the trained ones' shards; with NVMe of as many as it may keep, beside the buffers of those that are on their way from
    files, and of a sub-group on its way back (swap_tensor/partitioned_param_swapper.py). Frozen shards have blocks of their own, and
    hpZ's second ones."""
    if job.offload.params == "none":
        return 0
    dtype, share = job.precision.params, held.partition
    if job.offload.params == "cpu":
        frozen = [bytes_of(-(-numel // data_parallel(job)), dtype) for numel in held.frozen_numels]
        second = [bytes_of(numel // knobs.hpz, dtype) for numel in held.numels] if knobs.hpz > 1 else []
        blocks = [bytes_of(share, dtype), *frozen, *second]
        return sum(pinned(size) if pins(job) else size for size in blocks)
    kept = min(share, _option(job, "max_in_cpu", _MOST_IN_CPU))
    count, size = _option(job, "buffer_count", _PARAM_BUFFERS), _option(job, "buffer_size", _PARAM_BUFFER)
    buffers = count * _aligned(bytes_of(size, dtype))
    if kept < share:
        buffers += _aligned(bytes_of(max(stage3.stepped_sizes(held, knobs)), dtype))
    return buffers + pinned(bytes_of(kept, dtype))


def _aligned(n_bytes: int) -> int:
    """As asynchronous reads want it (swap_tensor/constants.py, AIO_ALIGNED_BYTES); locked by itself, not by torch's allocator."""
    return -(-n_bytes // _AIO_ALIGNED) * _AIO_ALIGNED


def _option(job: Job, name: str, default: int) -> int:
    value = job.engine.options.get(name, default)
    assert isinstance(value, int), name  # job/options reads it as a count
    return value


def pins(job: Job) -> bool:
    """Whether what waits on the host does so in page-locked memory."""
    return bool(job.engine.options.get("pin_memory", version_of(job) >= _PINNED))


def _owned(held: Held) -> int:
    return max(
        (sum(flat.own(index % flat.shards).whole for _, flat in held.flats) for index in range(_most(held))), default=0
    )


def _most(held: Held) -> int:
    return max((flat.shards for _, flat in held.flats), default=0)
