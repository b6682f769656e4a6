"""Ops that memory bounds, forward and backward, by the bytes that a step's account counts for them (timing/traffic.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from ullage.bench.clock import COPIES, Pool, Task, in_turn

Run = Callable[[], object]
Drawn = Callable[[], torch.Tensor]
"""Makes one more of the tensors of a kind's size."""

WIDTH = 512
"""Features of a row: a small model's hidden size."""
VOCABULARY = 4096


@dataclass(kw_only=True)
class Kind:
    """kind: of calibration/memory.py. tensors: of x's size that are counted, all its ops together. ops: as many."""

    kind: str
    backward: bool
    tensors: int
    ops: int
    made: Callable[[Drawn], Run]
    width: int = WIDTH


def _multiplied(drawn: Drawn) -> Run:
    one, other = drawn(), drawn()
    return lambda: one * other


def _multiplied_back(drawn: Drawn) -> Run:
    one, other = drawn().requires_grad_(), drawn().requires_grad_()
    return _back(one * other, (one, other), drawn())


def _tanh(drawn: Drawn) -> Run:
    x = drawn()
    return lambda: x.tanh()


def _tanh_back(drawn: Drawn) -> Run:
    x = drawn().requires_grad_()
    return _back(x.tanh(), (x,), drawn())


def _normed(drawn: Drawn) -> Run:
    """RMSNorm as layer code writes it: a square, its mean and a product; the row's own numbers do not count."""
    x = drawn()
    return lambda: _norm(x)


def _normed_back(drawn: Drawn) -> Run:
    x = drawn().requires_grad_()
    return _back(_norm(x), (x,), drawn())


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _softmax(drawn: Drawn) -> Run:
    x = drawn()
    return lambda: functional.log_softmax(x, -1)


def _softmax_back(drawn: Drawn) -> Run:
    x = drawn().requires_grad_()
    return _back(functional.log_softmax(x, -1), (x,), drawn())


def _loss(drawn: Drawn) -> Run:
    x = drawn()
    labels = _labels(x)
    return lambda: functional.nll_loss(x, labels)


def _loss_back(drawn: Drawn) -> Run:
    x = drawn().requires_grad_()
    loss = functional.nll_loss(x, _labels(x))
    return _back(loss, (x,), torch.ones_like(loss))


def _labels(x: torch.Tensor) -> torch.Tensor:
    return torch.randint(x.shape[-1], (x.shape[0],), device=x.device)


def _permuted(drawn: Drawn) -> Run:
    x = drawn()
    order = torch.randperm(x.shape[0], device=x.device)
    return lambda: x[order]


def _copied(drawn: Drawn) -> Run:
    x = drawn()
    return lambda: x.clone()


def _back(result: torch.Tensor, leaves: tuple[torch.Tensor, ...], gradient: torch.Tensor) -> Run:
    return lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True)


# Tensors as timing/traffic.py counts them: forward what is read and written, backward what was saved, the gradient, and the gradients of
# the inputs.
KINDS = (
    Kind(kind="pointwise", backward=False, tensors=3, ops=1, made=_multiplied),
    Kind(kind="pointwise", backward=True, tensors=5, ops=1, made=_multiplied_back),
    Kind(kind="tanh", backward=False, tensors=2, ops=1, made=_tanh),
    Kind(kind="tanh", backward=True, tensors=3, ops=1, made=_tanh_back),
    Kind(kind="norm", backward=False, tensors=5, ops=3, made=_normed),
    Kind(kind="norm", backward=True, tensors=8, ops=3, made=_normed_back),
    Kind(kind="softmax", backward=False, tensors=2, ops=1, made=_softmax, width=VOCABULARY),
    Kind(kind="softmax", backward=True, tensors=3, ops=1, made=_softmax_back, width=VOCABULARY),
    Kind(kind="cross_entropy", backward=False, tensors=1, ops=1, made=_loss, width=VOCABULARY),
    Kind(kind="cross_entropy", backward=True, tensors=2, ops=1, made=_loss_back, width=VOCABULARY),
    Kind(kind="permute", backward=False, tensors=2, ops=1, made=_permuted),
    Kind(kind="copy", backward=False, tensors=2, ops=1, made=_copied),
)


def task(kind: Kind, counted_bytes: int, pool: Pool) -> tuple[float, Task]:
    """Of about ``counted_bytes`` an op: what is counted exactly, and the task, whose seconds are of all its ops. pool: of its type."""
    row_bytes = kind.width * kind.tensors * pool.itemsize
    rows = max(1, round(counted_bytes * kind.ops / row_bytes))

    def made() -> Run:
        return in_turn([kind.made(lambda: pool.view(rows, kind.width)) for _ in range(COPIES)])

    return rows * row_bytes / kind.ops, Task(prepared=made)


# -- the optimizer

_WEIGHT = (WIDTH, WIDTH)
OPTIMIZER_BYTES = 40
"""Of an fp32 element, as timing/optimizer.py counts a clipped step of fused AdamW: 28, and 12 for clipping."""


def optimizer_task(numel: int, device: torch.device) -> tuple[float, Task]:
    """A clipped AdamW step over square weights of ``numel`` elements in all."""
    count = max(1, numel // (WIDTH * WIDTH))

    def made() -> Run:
        weights = [torch.nn.Parameter(torch.zeros(_WEIGHT, device=device)) for _ in range(count)]
        for one in weights:
            one.grad = torch.full_like(one, 1e-3)
        optimizer = torch.optim.AdamW(weights, fused=True)

        def run() -> None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

        return run

    return float(OPTIMIZER_BYTES * count * WIDTH * WIDTH), Task(prepared=made)
