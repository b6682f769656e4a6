"""What an engine does to weights' gradients, and to gathered parameters, beside matmuls and collectives: bytes of each parameter."""

from __future__ import annotations

from ullage import dtypes
from ullage.engines.base import flag
from ullage.job.job import Job
from ullage.timing.vintage import of_2021


def asynchronous(job: Job) -> bool:
    """Whether tensor parallelism sends beside the matmuls of the backward; Megatron-DeepSpeed is a fork of before that."""
    return job.engine.name == "megatron" and not of_2021(job.engine.options)


def _fuses(job: Job) -> bool:
    """Whether matmuls add into the gradients themselves (Megatron's gradient accumulation fusion)."""
    megatron = job.engine.name == "megatron" and not of_2021(job.engine.options)
    return megatron and flag(job.engine.options, "gradient_accumulation_fusion", True)


def accumulates(job: Job) -> bool:
    """Whether they add into a wider type than they would write: gradients in fp32."""
    return _fuses(job) and job.precision.grads == "fp32"


def accumulated_bytes(job: Job, compute: str) -> float:
    """Of each micro-batch: a gradient, made in ``compute``, added to those before it.

    Into an fp32 buffer beside it (Megatron's main_grad, DeepSpeed's bf16 optimizer): read, and the buffer read and written. By autograd:
    two reads and a write, from the second micro-batch on.
    """
    if _fuses(job):
        return 0.0
    made, kept = dtypes.bits(compute) / 8, dtypes.bits(job.precision.grads) / 8
    if job.engine.name in ("megatron", "deepspeed") and kept > made:
        return made + 2 * kept
    later = job.data.grad_accum - 1
    return 3 * kept * later / job.data.grad_accum


def copied_out_bytes(job: Job, gathered_bytes: int) -> int:
    """Of one gather: FSDP2 copies what it gathered into the parameters (_fsdp_collectives.py, foreach_all_gather_copy_out)."""
    return 2 * gathered_bytes if job.engine.name == "fsdp2" else 0


def copied_in_bytes(job: Job, compute: str) -> float:
    """Of one reduction: gradients copied into its input in the type that they are reduced in (_fsdp_collectives.py, chunk_cat; FSDP1:
    autograd of the flat parameter's views)."""
    return (dtypes.bits(compute) + dtypes.bits(job.precision.reduce)) / 8


def once_bytes(job: Job) -> float:
    """Once a step, of every parameter of the rank: Megatron zeroes its buffer, looks for NaN in it and scales it by the ranks (distributed/
    param_and_grad_buffer.py, reset and start_grad_sync): a read or a write each, and one of both."""
    return 4 * dtypes.bits(job.precision.grads) / 8 if job.engine.name == "megatron" else 0.0
