"""What a GPU's run does and a CPU's does not, where torch chooses by the device: a trace on the CPU is made to choose as on CUDA.

| choice | on CUDA | on the CPU | where |
|---|---|---|---|
| optimizer, neither flag given | foreach | for-loop | torch/utils/_foreach_utils.py |
| dropout | a mask of bytes is saved | noise in the input's type is | aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable |
| attention with dropout | the flash kernel all the same | the math path | aten/src/ATen/native/transformers/sdp_utils_cpp.cpp |
| attention with a term that asks for a gradient | the memory-efficient kernel, which makes one for each sequence | the math path | \
`sdp_utils_cpp.cpp`, check_attn_mask_shape; native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward` |
| softmax under autocast | in fp32 | in its input's type | aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import optimizer
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from ullage.kernels.transformers_positions import BIAS_ALIGNMENT
from ullage.trace.patch import replaced


@contextmanager
def cuda() -> Iterator[None]:
    """CPU tensors are treated as CUDA's for as long as this lasts."""
    attention = functional.scaled_dot_product_attention
    devices = _get_foreach_kernels_supported_devices()

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or p in (0.0, 1.0) or inplace or not input.numel():
            return _dropout(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    def attend(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        term = kwargs.get("attn_mask")
        if term is not None and term.requires_grad:
            query, key, value = args[:3]
            return _with_term(query, key, value, term, kwargs.get("scale"))
        return attention(*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:], **kwargs)

    def softmax(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _softmax(input.float() if torch.is_autocast_enabled("cpu") else input, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(functional, "softmax", softmax))
        stack.enter_context(replaced(functional, "dropout", dropout))
        stack.enter_context(replaced(functional, "scaled_dot_product_attention", attend))
        stack.enter_context(
            replaced(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor])
        )
        stack.enter_context(replaced(optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices, "cpu"]))
        yield


def _with_term(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, term: torch.Tensor, scale: Any
) -> torch.Tensor:
    """Attention with a term added to the scores, expanded to every sequence before the kernel has it."""
    term = term.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return _WithTerm.apply(query, key, value, term, scale)  # type: ignore[no-any-return,no-untyped-call]


class _WithTerm(torch.autograd.Function):
    """The CPU's kernel, and beside its gradients one of the term, in rows as CUDA's kernel aligns them."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, term: torch.Tensor, scale: Any
    ) -> Any:
        out, lse = _kernel(query, key, value, attn_mask=term, scale=scale)
        ctx.save_for_backward(query, key, value, term, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, term, out, lse = ctx.saved_tensors
        made = _kernel_backward(grads[0], query, key, value, out, lse, 0.0, False, attn_mask=term, scale=ctx.scale)
        *rows, keys = term.shape
        of_term = term.new_empty(*rows, -(-keys // BIAS_ALIGNMENT) * BIAS_ALIGNMENT)[..., :keys]
        return (*made, of_term, None)


_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_dropout = functional.dropout
_softmax = functional.softmax
