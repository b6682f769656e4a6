"""Inputs of checkpointed blocks that wait on the host.

Sources: torchtune training/_activation_offloading.py (``OffloadActivations``, which TRL and axolotl have too: trl
models/activation_offloading.py), whose pack and unpack hooks work under any engine; DeepSpeed runtime/activation_checkpointing/
checkpointing.py, which Megatron-DeepSpeed and GPT-NeoX call for their layers.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from ullage.engines.base import flag, pinned
from ullage.engines.deepspeed.options import version_of
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory.chunk import Element, Inputs, input_bytes

PARTITIONS = "partition_activations"
ON_HOST = "cpu_checkpointing"

COPIES_ASIDE = (0, 19, 6)
"""First version of DeepSpeed whose checkpoints are copied on a stream of their own, from and to pinned memory (#8282)."""

_STAY = 2
"""Inputs that this leaves on the device: the newest, and the one before whose copy may be under way (keep_last_count, and what
``_reap_forward_stash`` has not dropped)."""


def calls_deepspeed(job: Job) -> bool:
    """Whether the layers' checkpoints are DeepSpeed's own: transformers' code calls torch's."""
    return job.engine.name == "deepspeed" and job.stack == "megatron"


def goes(job: Job) -> bool:
    """Whether checkpoints' inputs go to the host."""
    asked = calls_deepspeed(job) and flag(job.engine.options, ON_HOST, False)
    return job.engine.name != "megatron" and (job.offload.activations != "none" or asked)


def waits(job: Job) -> bool:
    """Whether a pass waits for the copies: DeepSpeed's blocking ones, of memory that is not pinned."""
    return goes(job) and calls_deepspeed(job) and not _aside(job)


def inputs(job: Job) -> Inputs | None:
    """What becomes of checkpoints' inputs; None: they stay."""
    if goes(job):
        return Inputs(stay=_STAY if _aside(job) else 0)
    return Inputs(parts=job.layout.tp) if _partitions(job) else None


def part(job: Job) -> float:
    """Of a checkpoint's input, what a rank keeps."""
    return 1 / job.layout.tp if _partitions(job) else 1.0


def _partitions(job: Job) -> bool:
    return calls_deepspeed(job) and flag(job.engine.options, PARTITIONS, False)


def _aside(job: Job) -> bool:
    return calls_deepspeed(job) and not _partitions(job) and version_of(job) >= COPIES_ASIDE


def refuse(job: Job) -> None:
    """What is not modelled of a job whose activations go to the host, or are divided."""
    if inputs(job) is None:
        return
    on_host = goes(job)
    key, value = ("offload.activations", "cpu") if on_host else (f"engine.options.{PARTITIONS}", "true")
    if on_host and job.recompute.kind != "full":
        raise Unsupported(
            "is modelled for checkpointed layers alone", key=key, value=value, remedy="set recompute: full"
        )
    if job.layout.pp > 1:  # stages are handed their input in buffers that stay
        raise Unsupported("is not modelled in a pipeline", key=key, value=value, remedy="set pp: 1")


def host_bytes(job: Job, context: Context, elements: ListLike[Element]) -> int:
    """Of one rank: a block for the input of every checkpoint of a micro-batch, pinned but where DeepSpeed copied it in a blocking way."""
    if not goes(job):
        return 0
    sizes = [int(size * part(job)) for element in elements if (size := input_bytes(element, context))]
    return sum(sizes if waits(job) else map(pinned, sizes))
