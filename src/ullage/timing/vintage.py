"""What the names of a job's options tell of when its software was made, where no version is stated."""

from __future__ import annotations

from collections.abc import Mapping


def of_2021(options: Mapping[str, object]) -> bool:
    """Megatron-LM when it still had a choice of DDP_impl: before gradients were accumulated inside of matmuls (2022-03), and before
    tensor parallelism sent anything beside them (2021-11)."""
    return "DDP_impl" in options


def of_2022(options: Mapping[str, object]) -> bool:
    """Megatron-LM, or a fork of it, before ``checkpoint_activations`` became ``recompute_granularity`` (NVIDIA/Megatron-LM@bbab79f,
    2022-05-16)."""
    return "checkpoint_activations" in options


def norms_early(options: Mapping[str, object]) -> bool:
    """Whether norms are those from before Megatron's persistent kernel (NVIDIA/Megatron-LM@a2fdcdf, 2021-10), which forks of before did
    not take."""
    return of_2021(options) or of_2022(options)


def of_2023(options: Mapping[str, object]) -> bool:
    """MPT as its benchmarks ran it, with attn_impl triton (llm-foundry@5e85bd6 scripts/train/benchmarking/submit_benchmarks.py, which sets
    this norm)."""
    return options.get("norm_type") == "low_precision_layernorm"


def cuda_of(options: Mapping[str, object], stack: str) -> str:
    """Whose cuBLAS multiplies; "" a recent one.

    CUDA 11.7 is as old as Megatron's new names; what ran under the old ones had 11.5 (bigscience@9e64ede train/tr11-176B-ml/README.md) or
    an older one: the oldest of which a rate is published stands for them. MPT's tables of 2023-05, all in PURE, are of torch 1.13.1 with
    CUDA 11.7, those of 2023-10, in DEFAULT, of torch 2.1.0 with 12.1 (llm-foundry@5f43bf1 and @b2a43a1 scripts/train/benchmarking/sweep.sh
    and README.md)."""
    if stack == "megatron" and of_2022(options):
        return "11.6"
    if not of_2023(options):
        return ""
    return "11.7" if options.get("mixed_precision") == "PURE" else "12.1"
