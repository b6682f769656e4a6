"""Linears that share what they cast: of an input that several read, autocast makes a copy for each, and keeps them all for the backward.

autocast caches copies of weights alone (aten/src/ATen/autocast_mode.cpp, cached_cast). The stream is in fp32 under it, so of a llama's
layer q, k and v keep three equal copies of one norm's output, gate and up two of the other's. The copy is the same bit for bit; its
gradient is summed in the copy's type, as where all is in 16 bits, and cast once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary


def cast_once(model: nn.Module) -> None:
    """From now on, each nn.Linear takes a copy that another has made of the same tensor."""
    casts = _Casts()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(casts)


class _Casts:
    """Copies that live no longer than what they are copies of, unless autograd has saved them."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()

    def __call__(self, _: nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        (source,) = given
        kind = source.device.type
        if source.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return None
        state = source._version, torch.is_grad_enabled()
        made, copy = self._of.get(source, (None, None))
        if made != state:  # none yet, or of another content, or without a gradient
            copy = source.to(torch.get_autocast_dtype(kind))
            self._of[source] = state, copy
        return copy  # type: ignore[no-any-return]
