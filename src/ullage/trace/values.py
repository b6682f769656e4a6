"""Values beside fake tensors. A fake tensor has no contents, and real code sometimes asks for some: is this mask all ones, are these
positions packed, at which step is the optimizer?

What is small and follows from known values alone is computed for real beside its fake tensor, so that such a question gets the
answer of a real run and the run takes a real run's path. Weights and all that follows from them are not known, and a question
about them remains an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from ullage.trace.lives import tensors_in

LARGEST = 1 << 20
"""Integers beyond which a tensor's value is not followed: a batch of token ids is below, a mask of seq x seq above."""

LARGEST_FLOATS = 1 << 16
"""As many floats: a noise schedule and a step count are below, a rotary table that nobody asks for is above."""

_MAKERS = ("arange", "linspace", "zeros", "ones", "full", "randint", "scalar_tensor", "tril_indices", "eye")
"""Makers whose values mean something; those of rand and empty do not."""

_ASK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_WAIT = getattr(getattr(torch.ops._c10d_functional, "wait_tensor", None), "default", None)
"""Its fake kernel returns a new tensor, the real one the tensor that it is given."""


def follow(func: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """Runs an op on fake tensors and, where the values of all that it reads are known, on those too."""
    if func is _WAIT:
        return args[0]
    if not _is_known(func, tensors_in(args, kwargs)):
        with _uncached(mode) if _takes_lists(func) else nullcontext():
            out = func(*args, **kwargs)
        if func._schema.is_mutable:
            _forget(tensors_in(args, kwargs))
        return out
    if any(tag in func.tags for tag in _ASK):
        return tree_map_only(
            torch.Tensor, lambda real: _beside(mode.from_tensor(real), real), _real(func, args, kwargs)
        )
    out = func(*args, **kwargs)
    fakes = list(tensors_in(out))
    if all(map(_is_small, fakes)):
        for fake, real in zip(fakes, tensors_in(_real(func, args, kwargs)), strict=True):
            _beside(fake, real)
    return out


@cache
def _takes_lists(func: Any) -> bool:
    return any("List[Tensor]" in str(one.type) for one in func._schema.arguments)


@contextmanager
def _uncached(mode: FakeTensorMode) -> Iterator[None]:
    """torch's cache of fake results keeps the shape of every tensor of a list, and to look a long one up takes longer than to make it."""
    enabled, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = enabled


def _is_known(func: Any, tensors: Iterator[torch.Tensor]) -> bool:
    first = next(tensors, None)
    if first is None:
        return _makes_values(func)
    return value(first) is not None and all(value(tensor) is not None for tensor in tensors)


def value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The known value of a fake tensor, or None. A real one among the fakes is its own: torch.tensor(3) on its way to be fake."""
    if isinstance(tensor, FakeTensor):
        known: torch.Tensor | None = getattr(tensor, "_ullage_value", None)
        return known
    return tensor if _is_small(tensor) and not tensor.is_meta else None


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= (LARGEST_FLOATS if tensor.is_floating_point() else LARGEST)


def _makes_values(func: Any) -> bool:
    name: str = func._schema.name.partition("::")[2]
    return name.startswith(_MAKERS)


def _forget(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            vars(tensor).pop("_ullage_value", None)


def _beside(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    tensor._ullage_value = real  # type: ignore[attr-defined]
    return tensor


def _real(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {key: one for key, one in kwargs.items() if key != "device"}
    real_args, real_kwargs = tree_map_only(torch.Tensor, value, (tuple(args), kwargs))
    with torch._C._DisableTorchDispatch():
        return func(*real_args, **real_kwargs)
