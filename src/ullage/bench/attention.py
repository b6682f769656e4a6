"""Fused attention as torch chooses it on this device, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from ullage.bench.clock import COPIES, Pool, Task, in_turn

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


def point(dtype: str, pool: Pool, head_dim: int, seq: int, *, causal: bool, backward: bool) -> Point:
    """pool: of that type."""

    def heads() -> torch.Tensor:
        """As layer code hands them over: heads and positions exchanged in a view."""
        return pool.view(1, seq, HEADS, head_dim).transpose(1, 2).detach().requires_grad_()

    def forward() -> object:
        return functional.scaled_dot_product_attention(heads(), heads(), heads(), is_causal=causal)

    def back() -> Callable[[], object]:
        q, k, v = heads(), heads(), heads()
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        gradient = heads().detach()
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    def made() -> Callable[[], object]:
        return in_turn([back() for _ in range(COPIES)]) if backward else forward

    return Point(dtype=dtype, head_dim=head_dim, causal=causal, backward=backward, seq=seq, task=Task(prepared=made))
