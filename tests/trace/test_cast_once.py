"""Linears that share a copy of their input: the same numbers as autocast's own copies, and no copy that is out of date."""

from __future__ import annotations

import torch
from torch import nn

from ullage.trace.cast_once import cast_once


class _Two(nn.Module):
    """Two linears of one input, which may be written to in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, source: torch.Tensor, *, changed: bool = False) -> torch.Tensor:
        made = self.first(source)
        if changed:
            source.add_(1)
        return made + self.second(source)


def _ran(
    source: torch.Tensor, *, once: bool, changed: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """What comes out, gradients by name, and how many copies of the input autograd has saved."""
    model = _Two()
    if once:
        cast_once(model)
    saved: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == source.shape:
            saved.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(source.clone(), changed=changed)
        out.sum().backward()
    return out, {name: param.grad for name, param in model.named_parameters() if param.grad is not None}, len(saved)


def test_numbers_are_those_of_autocast_and_copies_are_fewer() -> None:
    source = torch.randn(3, 8)
    plain, gradients, copies = _ran(source, once=False)
    shared, same, fewer = _ran(source, once=True)
    assert torch.equal(shared, plain)
    assert all(torch.equal(same[name], grad) for name, grad in gradients.items())
    assert (copies, fewer) == (2, 1)


def test_an_input_that_is_written_to_is_cast_anew() -> None:
    source = torch.randn(3, 8)
    assert torch.equal(_ran(source, once=True, changed=True)[0], _ran(source, once=False, changed=True)[0])


def test_a_copy_without_a_gradient_is_not_taken_where_there_is_to_be_one() -> None:
    model, source = _Two(), torch.randn(3, 8, requires_grad=True)
    cast_once(model)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(source)
        model(source).sum().backward()
    assert source.grad is not None


def test_nothing_is_cast_without_autocast() -> None:
    model = _Two()
    cast_once(model)
    assert model(torch.randn(3, 8)).dtype == torch.float32
