"""What torch keeps of a model and its optimizer, as it lies in memory, by the names that it has on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

MODEL, OPTIMIZER = "model.", "optimizer.state."
"""What the names of a checkpoint's tensors begin with."""


def _unchanged(name: str) -> str:
    return name


def states_of(
    model: nn.Module, optimizer: Any, *, made: bool, named: Callable[[str], str] = _unchanged
) -> dict[str, Any]:
    """Trained parameters, buffers, and the states of those parameters that this rank steps, DTensors where they are sharded: writing into
    these tensors is writing into the run. Frozen parameters are left out; a weight that has two names has the first.

    made: optimizer states begin as zeros where there are none yet. named: a name of the model as that on one device.
    """
    found = {f"{MODEL}{named(name)}": value for name, value in _trained(model).items()}
    if optimizer.state or made:
        states: Any = get_optimizer_state_dict(model, optimizer)["state"]
        for name, state in states.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{OPTIMIZER}{named(name)}.{key}"] = value
    return found


def _trained(model: nn.Module) -> dict[str, Any]:
    every = {_bare(name): param for name, param in model.named_parameters(remove_duplicate=False)}
    first = {id(param): _bare(name) for name, param in model.named_parameters() if param.requires_grad}
    found: dict[str, Any] = {}
    for name, value in get_model_state_dict(model).items():
        known = first.get(id(every[name])) if name in every else name
        if known is not None:
            found[known] = value
    return found


def _bare(name: str) -> str:
    return name.removeprefix("module.")
