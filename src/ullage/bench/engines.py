"""What an engine's own Python takes of a layer: on the CPU nothing runs meanwhile."""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ullage.bench.clock import Task, task_of

LAYERS = 6
SPLIT_SENDS = {"all_reduce": 7}
"""Of a layer under tensor parallelism: two sums forward, and backward one for the input of each product by columns."""
_WIDTH = 16
_ROWS = 2


class _Layer(nn.Module):
    """As many parameters and products as a transformer's layer has, and hardly anything in them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        names = ("q", "k", "v", "o", "gate", "up", "down")
        self.of = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in names})
        self.norm, self.other = (nn.Parameter(torch.ones(width)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of, x = self.of, x * self.norm
        x = of["o"](of["q"](x) + of["k"](x) + of["v"](x)) * self.other
        out: torch.Tensor = of["down"](of["gate"](x) * of["up"](x))
        return out


def alone(device: torch.device) -> Task:
    """A clipped step of the layers under no engine."""
    return _task(_model(device), device)


def sharded(device: torch.device) -> Task:
    """The same under FSDP2, each layer a unit."""
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    model = _model(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _task(model, device)


def split(device: torch.device) -> Task:
    """The same under tensor parallelism, by columns and rows."""
    ranks = distributed.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    column = {f"of.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    model = _model(device)
    for layer in model:
        parallelize_module(layer, mesh, {**column, "of.o": RowwiseParallel(), "of.down": RowwiseParallel()})
    return _task(model, device)


def _model(device: torch.device) -> nn.Sequential:
    width = _WIDTH * (distributed.get_world_size() if distributed.is_initialized() else 1)
    return nn.Sequential(*(_Layer(width) for _ in range(LAYERS))).to(device)


def _task(model: nn.Sequential, device: torch.device) -> Task:
    whole = [one for one in model.parameters() if not isinstance(one, DTensor)]
    on_mesh = [one for one in model.parameters() if isinstance(one, DTensor)]
    groups = [group for group in (whole, on_mesh) if group]  # the two are not stepped together
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    layer = model[0]
    assert isinstance(layer, _Layer)
    x = torch.randn(_ROWS, layer.norm.shape[0], device=device)

    def run() -> None:
        model(x).sum().backward()
        for group in groups:
            nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return task_of(run)
