"""Values beside fake tensors. A fake tensor has no contents, and real code sometimes asks for some: is this mask all ones, are these
positions packed, at which step is the optimizer?

What is small and follows from known values alone is computed for real beside its fake tensor, so that such a question gets the
answer of a real run and the run takes a real run's path. Weights and all that follows from them are not known, and a question
about them remains an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

LARGEST = 1 << 20
"""Elements beyond which a tensor's value is not followed: a batch of token ids is below, a mask of seq x seq above."""

_MAKERS = ("arange", "linspace", "zeros", "ones", "full", "randint", "scalar_tensor", "tril_indices", "eye")
"""Makers whose values mean something; those of rand and empty do not."""

_ASK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_WAIT = getattr(getattr(torch.ops._c10d_functional, "wait_tensor", None), "default", None)
"""Its fake kernel returns a new tensor, the real one the tensor that it is given."""


def follow(func: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """Runs an op on fake tensors and, where the values of all that it reads are known, on those too."""
    if func is _WAIT:
        return args[0]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    known = all(value(tensor) is not None for tensor in tensors) if tensors else _makes_values(func)
    if not known:
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            _forget(tensors)
        return out
    if any(tag in func.tags for tag in _ASK):
        return tree_map_only(
            torch.Tensor, lambda real: _beside(mode.from_tensor(real), real), _real(func, args, kwargs)
        )
    out = func(*args, **kwargs)
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if all(_is_small(leaf) for leaf in leaves):
        reals = [leaf for leaf in tree_leaves(_real(func, args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for leaf, real in zip(leaves, reals, strict=True):
            _beside(leaf, real)
    return out


def value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The known value of a fake tensor, or None. A real one among the fakes is its own: torch.tensor(3) on its way to be fake."""
    if isinstance(tensor, FakeTensor):
        known: torch.Tensor | None = getattr(tensor, "_ullage_value", None)
        return known
    return tensor if _is_small(tensor) and not tensor.is_meta else None


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= LARGEST


def _makes_values(func: Any) -> bool:
    name: str = func._schema.name.partition("::")[2]
    return name.startswith(_MAKERS)


def _forget(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            tensor._ullage_value = None  # type: ignore[attr-defined]


def _beside(tensor: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    tensor._ullage_value = real  # type: ignore[attr-defined]
    return tensor


def _real(func: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {key: one for key, one in kwargs.items() if key != "device"}
    real_args, real_kwargs = tree_map_only(torch.Tensor, value, (tuple(args), kwargs))
    with torch._C._DisableTorchDispatch():
        return func(*real_args, **real_kwargs)
