"""How an engine's activation checkpointing runs a forward again: inside a node of autograd or not, to its end or as far as is needed."""

from __future__ import annotations

from ullage.job.engine import OF_TRANSFORMERS
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.kernels.torchtitan_version import EARLY_STOP_UNTIL, before
from ullage.kernels.transformers_loss import version_of

NON_REENTRANT_SINCE = (5, 0)
"""transformers' gradient checkpointing is reentrant before this version (modeling_utils.py, gradient_checkpointing_enable)."""


def is_reentrant(job: Job, context: Context) -> bool:
    """Under engines that leave it to the model (replicas); FSDP2 and DeepSpeed are run without."""
    return (
        job.stack in OF_TRANSFORMERS
        and job.engine.name not in ("fsdp2", "deepspeed")
        and version_of(context) < NON_REENTRANT_SINCE
    )


def stops_early(job: Job, context: Context) -> bool:
    """Non-reentrant checkpointing ends a recomputation with the last tensor that is needed, unless it is told not to (torch/utils/
    checkpoint.py, set_checkpoint_early_stop), as torchtitan tells it. Megatron's own always runs to the end."""
    if job.stack == "megatron" and job.engine.name in ("megatron", "deepspeed"):
        return False
    if job.stack == "torchtitan":
        return before(context, EARLY_STOP_UNTIL)
    return not is_reentrant(job, context)
