"""Fused attention as torch chooses it on this device, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from ullage.bench.clock import Task

HEADS = 8


@dataclass(kw_only=True)
class Point:
    """One length of one series. flops: a forward's two products, the backward's 2.5 times that, half under a causal mask."""

    dtype: str
    head_dim: int
    causal: bool
    backward: bool
    seq: int
    task: Task

    @property
    def flops(self) -> float:
        forward = 4 * HEADS * self.seq**2 * self.head_dim
        return forward * (2.5 if self.backward else 1.0) / (2 if self.causal else 1)


def point(
    dtype: str, torch_dtype: torch.dtype, head_dim: int, seq: int, device: torch.device, *, causal: bool, backward: bool
) -> Point:
    def made() -> Callable[[], object]:
        # as layer code hands them over: heads and positions exchanged in a view
        q, k, v = (
            torch.randn(1, seq, HEADS, head_dim, device=device).to(torch_dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        if not backward:
            return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    return Point(dtype=dtype, head_dim=head_dim, causal=causal, backward=backward, seq=seq, task=Task(prepared=made))
