"""Where PyTorch's CPU code and its CUDA code save other things or allocate otherwise: all of it, each with its reason.

A trace without a GPU sees the CPU's; an estimate is of CUDA's. What trace/like.py makes a CPU choose as CUDA does is no matter of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ullage.kernels.step import Context


class Difference(NamedTuple):
    """What each device does, and where the source says so."""

    cuda: str
    cpu: str
    source: str


DIFFERENCES: Mapping[str, Difference] = {
    "attention backward": Difference(
        "accumulates in fp32 beside its results, and makes whole key and value gradients where query heads share them",
        "allocates nothing that torch sees",
        "csrc/flash_attn/flash_api.cpp, mha_bwd; aten/src/ATen/native/cpu/FlashAttentionKernel.cpp",
    ),
    "attention mask": Difference(
        "its columns are padded to a multiple of 8 for the mem-efficient kernel",
        "as it is",
        "aten/src/ATen/native/transformers/attention.cpp, pad_bias",
    ),
    "autocast of expm1": Difference(
        "runs in fp32, and softplus too",
        "runs in its input's type",
        "aten/src/ATen/autocast_mode.h, AT_FORALL_FP32; autocast_mode.cpp, TORCH_LIBRARY_IMPL(aten, AutocastCPU)",
    ),
    "autocast of layer norm and softmax": Difference(
        "runs in fp32",
        "runs in its input's type",
        "aten/src/ATen/autocast_mode.h, AT_FORALL_FP32; autocast_mode.cpp, TORCH_LIBRARY_IMPL(aten, AutocastCPU)",
    ),
    "autocast of Nemotron's norm": Difference(
        "casts what it is given into autocast's type",
        "leaves it as it is: it asks whether CUDA's autocast is on",
        "transformers/models/nemotron/modeling_nemotron.py, _cast_if_autocast_enabled",
    ),
    "convolution backward": Difference(
        "copies the output's gradient into the output's order where it has another",
        "allocates nothing that torch sees",
        "aten/src/ATen/native/cudnn/ConvShared.cpp, cudnn_convolution_backward",
    ),
    "dropout mask": Difference(
        "one byte an element",
        "noise in the input's type",
        "aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable",
    ),
    "expert histogram": Difference(
        "counts the expert ids, integers",
        "counts floating-point copies of them: histc takes no integers",
        "transformers/integrations/moe.py, grouped_mm_experts_forward",
    ),
    "kernels of a gated DeltaNet": Difference(
        "those of flash-linear-attention and causal-conv1d, where they are installed",
        "none: Triton's and CUDA's run there alone, and transformers' own code in their place",
        "transformers/integrations/hub_kernels.py, use_kernel_func_from_hub_with_fallback",
    ),
    "layer norm statistics": Difference(
        "fp32 whatever the input",
        "the input's type",
        "aten/src/ATen/native/cuda/layer_norm_kernel.cu, acc_type; aten/src/ATen/native/layer_norm.cpp",
    ),
}


def on_cuda(context: Context, which: str) -> bool:
    """Whether CUDA's side of a difference holds."""
    assert which in DIFFERENCES, which
    return context.device == "cuda"
