"""Where torch is watched beside its ops, for as long as a trace runs: module calls, backwards, optimizer steps, resizes.

And the looks that libraries take at their tensors. A library that sees a fake tensor thinks that it is being compiled and may
take another path than in a run: transformers builds a causal mask that a run without padding does not have, DTensor makes tensors of
the global shape to learn about shapes. A trace takes the path of a run and does not count what a run does not make.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import _meta_registrations, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ullage.trace import sharded
from ullage.trace.patch import replaced
from ullage.trace.recorder import Recorder


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Tells ``recorder`` what it cannot see as ops; everything is put back at the end."""
    with ExitStack() as stack:
        stack.enter_context(_calls(recorder))
        stack.enter_context(_backwards(recorder))
        stack.enter_context(_resizes(recorder))
        stack.enter_context(sharded.unseen_looks(recorder))
        before = register_optimizer_step_pre_hook(lambda *_: _steps(recorder))
        stack.callback(before.remove)
        after = register_optimizer_step_post_hook(lambda optimizer, *_: _stepped(recorder, optimizer))
        stack.callback(after.remove)
        if recorder.fake is not None:
            stack.enter_context(sharded.as_in_a_run(recorder))
            stack.enter_context(as_in_a_run())
        yield


def _steps(recorder: Recorder) -> None:
    recorder.tag_gradients()
    recorder.mark("optimizer")


def _stepped(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    recorder.tag_states(optimizer)
    recorder.mark("between")


@contextmanager
def _calls(recorder: Recorder) -> Iterator[None]:
    call: Callable[..., Any] = nn.Module.__call__

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder.enter(self, (args, kwargs))
        try:
            return call(self, *args, **kwargs)
        finally:
            recorder.leave()

    with replaced(nn.Module, "__call__", watched):
        yield


@contextmanager
def _backwards(recorder: Recorder) -> Iterator[None]:
    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            outer = recorder.begin_backward()
            try:
                return run(*args, **kwargs)
            finally:
                recorder.end_backward(outer)

        return backward

    with (
        replaced(torch.autograd, "backward", watched(torch.autograd.backward)),
        replaced(torch.autograd, "grad", watched(torch.autograd.grad)),
    ):
        yield


@contextmanager
def _resizes(recorder: Recorder) -> Iterator[None]:
    resize = torch.UntypedStorage.resize_

    def watched(self: torch.UntypedStorage, size: int) -> Any:
        out = resize(self, size)
        recorder.resized(self)
        return out

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def as_in_a_run() -> Iterator[None]:
    """transformers is told that no tensor is fake; values.py answers what it then asks.

    trunc_normal_ draws again and again until no value is outside its bounds: here once, since there are no values. module.to() sets
    ``param.data``, as it does with tensors that are no fakes (it would swap the two Python objects, and cannot: fakes are referred to).
    """
    with ExitStack() as stack:
        found = sys.modules.get("transformers.utils.import_utils")
        if hasattr(found, "is_fake_tensor"):
            stack.enter_context(replaced(found, "is_fake_tensor", lambda _tensor: False))
        if hasattr(nn.init, "_no_grad_trunc_normal_"):
            stack.enter_context(replaced(nn.init, "_no_grad_trunc_normal_", _drawn_once))
        stack.enter_context(replaced(torch.utils, "swap_tensors", _data_set))
        if hasattr(_meta_registrations, "_meta_grouped_mm_common"):
            stack.enter_context(replaced(_meta_registrations, "_meta_grouped_mm_common", _any_type))
        yield


def _data_set(tensor: torch.Tensor, other: torch.Tensor) -> None:
    if isinstance(tensor, FakeTensor) and isinstance(other, FakeTensor):
        tensor.data = other.data
        tensor.fake_device = other.fake_device
    else:
        _swap_tensors(tensor, other)


_swap_tensors: Callable[..., None] = torch.utils.swap_tensors


def _any_type(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """torch's fake grouped_mm takes bf16 alone; the real one computes in fp32 too, into a tensor of the same shape."""
    if left.dtype != torch.float32:
        return _grouped_mm(left, right, *args, **kwargs)
    return _grouped_mm(left.to(torch.bfloat16), right.to(torch.bfloat16), *args, **kwargs).to(torch.float32)


_grouped_mm: Callable[..., torch.Tensor] = getattr(_meta_registrations, "_meta_grouped_mm_common", torch.matmul)


def _drawn_once(tensor: torch.Tensor, mean: float, std: float, *_: object, **__: object) -> torch.Tensor:
    with torch.no_grad():
        return tensor.normal_(mean, std)
