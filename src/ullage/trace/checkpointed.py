"""Which layers of a transformers model, or parts of them, are run again in the backward: torch's own checkpoints, without reentry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ullage.errors import Unsupported
from ullage.job.job import Job, Recompute
from ullage.trace.selective import contexts
from ullage.trace.wrapped import layers_of


def recompute(job: Job, model: Any) -> None:
    """Sets a model up as the job's ``recompute`` says."""
    kind = job.recompute.kind
    if kind == "sqrt":
        _group_layers(model)
    elif kind == "modules":
        _checkpoint_parts(model, job.recompute)
    elif kind != "none":
        _checkpoint_layers(job, model)


def recompute_stage(job: Job, model: Any) -> None:
    """Counts the layers that are left of the model, where the job counts layers."""
    if job.recompute.kind in ("every", "layers"):
        _checkpoint_layers(job, model)


def _checkpoint_layers(job: Job, model: Any) -> None:
    every = job.recompute.every if job.recompute.kind == "every" else 1
    how: dict[str, Any] = {"use_reentrant": False}
    if job.recompute.kind == "selective":
        how["context_fn"] = contexts
    if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.23
        model.activation_checkpointing_enable(how, every_n_layers=every)
    elif every == 1:
        model.gradient_checkpointing_enable(how)
    else:
        raise Unsupported("is not in the transformers that is installed", key="recompute.every", value=every)
    if job.recompute.kind == "layers":
        for layer in [*layers_of(model)][job.recompute.layers :]:
            layer.gradient_checkpointing = False  # type: ignore[assignment]


def _checkpoint_parts(model: nn.Module, how: Recompute) -> None:
    for layer in layers_of(model):
        for name, part in layer.named_children():
            if name in how.modules:
                part.forward = _checkpointed(part.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


# -- square root


def _group_layers(model: nn.Module) -> None:
    layers = {id(layer) for layer in layers_of(model)}
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and layers & set(map(id, child)):
                setattr(module, name, _Groups(child))


class _Groups(nn.ModuleList):
    """Layers under their own names that run a few at a time, under one checkpoint: as many as there are groups, or so."""

    def __getitem__(self, index: Any) -> Any:
        whole = isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1)
        return self if whole else super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        layers = list(self._modules.values())
        size = max(1, round(sqrt(len(layers))))
        waiting: list[Callable[[Any], Any]] = []
        for number, layer in enumerate(layers, 1):
            yield _InTurn(layer, waiting, last=number % size == 0 or number == len(layers))


class _InTurn:
    """A layer of a group: it waits for the last, which runs all."""

    def __init__(self, layer: Any, waiting: list[Callable[[Any], Any]], *, last: bool) -> None:
        self.layer, self.waiting, self.last = layer, waiting, last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        self.waiting.append(lambda stream: self.layer(stream, *args, **kwargs))
        if not self.last:
            return hidden
        group = self.waiting[:]
        self.waiting.clear()

        def run(stream: Any) -> Any:
            for layer in group:
                stream = layer(stream)
            return stream

        return checkpoint(run, hidden, use_reentrant=False) if torch.is_grad_enabled() else run(hidden)
