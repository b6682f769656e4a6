"""Replicas that reduce gradients where autograd made them: DDP's mean over the ranks, without its buckets.

torch's reducer holds one copy of all gradients from its constructor to the end of the run (engines/ddp/buckets.py), as a second copy or
as the gradients' own storage. Here there is nothing before a gradient is made, and nothing after zero_grad. FSDP2's own ``replicate``
(torch.distributed._composable.replicate_with_fsdp) has no buckets either, but copies each unit's parameters before it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import distributed, nn

from ullage.engines.ddp.in_place import ALONE_BYTES
from ullage.errors import Unsupported


@dataclass(kw_only=True)
class Exchange:
    """Parameters by name whose gradients are reduced together, in one tensor; of a single one, in its own. due: those not made yet."""

    params: dict[str, nn.Parameter]
    due: set[str] = field(default_factory=set)

    def started(self, ranks: int) -> Any:
        """The reduction, under way. As DDP does with a bucket (c10d/reducer.cpp), the mean's division comes first: sums do not overflow."""
        params = self.params.values()
        grads = [param.grad for param in params if param.grad is not None]
        if len(grads) == 1:
            (together,) = grads
        else:
            together = torch.cat([grad.reshape(-1) for grad in grads])
            parts = torch.split(together, [grad.numel() for grad in grads])
            for param, part in zip(params, parts, strict=True):
                param.grad = part.view_as(param)
        return distributed.all_reduce(together.mul_(1 / ranks), async_op=True)


class Replica(nn.Module):
    """A model on each of the ranks, which begin with the first one's weights. A backward's gradients stay the rank's own, unless it runs
    ``reduced``: the last of a step, which adds its gradients to those of earlier ones.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.module = model
        self._exchanges = tuple(_exchanges(model, layers))
        self._ranks = distributed.get_world_size()
        self._waiting: deque[Exchange] | None = None
        self._under_way: list[Any] = []
        for tensor in chain(model.parameters(), model.buffers()):
            distributed.broadcast(tensor.detach(), 0)
        for exchange in self._exchanges:
            for name, param in exchange.params.items():
                param.register_post_accumulate_grad_hook(partial(self._made, exchange, name))  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Around a forward and its backward, after which every gradient is the mean over the ranks."""
        self._waiting = deque(self._exchanges)
        for exchange in self._exchanges:
            exchange.due = set(exchange.params)
        try:
            yield
            if self._waiting:
                _refuse_unused(self._waiting)
            for work in self._under_way:
                work.wait()
        finally:
            self._waiting, self._under_way = None, []

    def _made(self, exchange: Exchange, name: str, _param: nn.Parameter) -> None:
        """Every rank starts its exchanges in the same order, whichever gradient was made first."""
        if self._waiting is None:
            return
        exchange.due.discard(name)
        while self._waiting and not self._waiting[0].due:
            self._under_way.append(self._waiting.popleft().started(self._ranks))


def _exchanges(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[Exchange]:
    """In about the order in which a backward ends them: layers from the last to the first, and in each the small parameters of a type
    together, after the large ones."""
    layer_of = {id(param): number for number, layer in enumerate(layers) for param in layer.parameters()}
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    for _, group in groupby(reversed(trained), key=lambda one: layer_of.get(id(one[1]))):
        small: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for name, param in group:
            if param.nbytes >= ALONE_BYTES:
                yield Exchange(params={name: param})
            else:
                small.setdefault(param.dtype, {})[name] = param
        yield from (Exchange(params=params) for params in small.values())


def _refuse_unused(waiting: Iterable[Exchange]) -> None:
    names = sorted(name for exchange in waiting for name in exchange.due)
    raise Unsupported(
        f"reduces the gradients of all weights, and {len(names)} had none in this step, {names[0]} among them",
        key="engine.options.reduce_in_place",
        value="true",
        remedy="use engine fsdp2",
    )
