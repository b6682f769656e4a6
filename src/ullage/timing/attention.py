"""Which attention kernel a job's layer code calls, by the names of calibration/data/attention.toml."""

from __future__ import annotations

from ullage.calibration.attention import BUILT_IN
from ullage.job.job import Job
from ullage.kernels.megatron_attention import CUDNN_SINCE
from ullage.kernels.torchtitan_version import runs_cudnn
from ullage.model.hf_config import has_encoder
from ullage.timing.vintage import of_2023

BACKENDS = {
    "flash": "flash-2",
    "flash_attention_2": "flash-2",
    "flash_attention_3": "flash-3",
    "flash_attention_4": "flash-4",
    "fused": "cudnn",
    "flex": "flex",
}
"""What ``attention_backend`` names (Megatron's and transformers' values)."""

BUILT_IN_UNTIL = "2025-02-28"
"""Of torchtitan's versions, which run torch's nightly builds: before these had FlashAttention 2.7.4 (pytorch/pytorch#148147)."""


def attention_kernel(job: Job) -> str:
    """``job.attention`` where it names a kernel; of "flash" the one that the stack takes."""
    if job.attention != "flash":
        return job.attention
    if has_encoder(job.model):
        return "mem-efficient"  # the one that takes terms of positions (kernels/transformers_positions.py)
    options = job.engine.options
    named = BACKENDS.get(str(options.get("attention_backend")))
    if named is not None:
        return named
    if job.stack == "megatron" and (job.cluster.device.compute_capability or (0, 0)) >= CUDNN_SINCE:
        return "cudnn"
    if job.stack == "torchtitan" and runs_cudnn(
        job.stack_version, options.get("attention_backend"), job.cluster.device.compute_capability
    ):
        return "cudnn"
    if job.stack == "torchtitan" and job.stack_version is not None and job.stack_version < BUILT_IN_UNTIL:
        return BUILT_IN
    return "triton" if of_2023(options) else "flash"
