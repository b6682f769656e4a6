"""What ops that memory bounds move, a norm of single ops held against those that torch itself runs, and what they compute in."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage.engines.base import context_of
from ullage.job.read import read_job
from ullage.model.build import graph as build
from ullage.timing.ops import block_work
from ullage.timing.work import Pass

ROWS, HIDDEN = 256, 2048
JOB = {
    "model": "llama-3.2-1b",
    "cluster": "8xH100-SXM-80GB",
    "stack": "torchtitan",
    "engine": {"name": "fsdp2"},
    "data": {"seq_len": ROWS, "micro_batch": 1},
}
VIEWS = ("view", "expand", "detach")


class Moved(TorchDispatchMode):
    """Bytes that ops read and write; of an expanded tensor those that lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] not in VIEWS:
            tensors = [one for one in (*args, out) if isinstance(one, torch.Tensor)]
            self.bytes += sum(min(one.untyped_storage().nbytes(), one.numel() * one.element_size()) for one in tensors)
        return out


def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torchtitan's class: cast up, normalise, cast down, scale."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
    return y.type_as(x) * weight


def composed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torch's op before its fused kernel: cast up, normalise, scale, cast down."""
    y = x.float()
    return y.mul(torch.rsqrt(y.pow(2).mean(-1, keepdim=True).add_(1e-5))).mul(weight).type_as(x)


@pytest.mark.parametrize(("code", "version"), [(own, "2024-12-01"), (composed, "2025-05-01")])
def test_norms_of_single_ops(code: Callable[..., torch.Tensor], version: str) -> None:
    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16).requires_grad_()
    with Moved() as forward:
        y = code(x, weight)
    gradient = torch.randn_like(y)
    with Moved() as backward:
        y.backward(gradient)
    assert _told(version) == pytest.approx((forward.bytes, backward.bytes), rel=0.01)


def _told(version: str) -> tuple[int, int]:
    """Forward and backward of a layer's first norm, in its kernels."""
    job = read_job(JOB | {"stack_version": version})
    graph = build(job.model)
    layer = next(run.block for run in graph.runs if run.block.role == "layer")
    works = [one for one in block_work(layer, context_of(job, graph)) if one.name.startswith("input_norm")]
    assert len(works) == 3
    return _bytes(one.forward for one in works), _bytes(one.backward for one in works)


def _bytes(passes: Iterable[Pass]) -> int:
    return sum(one.bytes for work in passes for one in work.traffic)


def test_an_op_is_of_the_type_that_most_of_its_bytes_are_of() -> None:
    """A llama's norm in bf16 goes up to fp32 and back; its last product, the stream and the activation are bf16."""
    job = read_job({**JOB, "stack": "transformers", "precision": "bf16"})
    model = build(job.model)
    layer = next(run.block for run in model.runs if run.block.role == "layer")
    found = {
        one.name: kernel.dtype for one in block_work(layer, context_of(job, model)) for kernel in one.forward.traffic
    }
    assert found["input_norm.square"] == found["input_norm.narrow"] == "fp32"
    assert found["attention_in"] == found["middle"] == found["product"] == "bf16"
