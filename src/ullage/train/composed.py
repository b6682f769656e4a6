"""A job as torch runs it: the model under its engine, the optimizer, and one step of the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from ullage.engines.fsdp2.policy import unwrapped
from ullage.frozen import FrozenMap
from ullage.job.job import Engine, Job, Layout
from ullage.trace.models import autocast, build
from ullage.trace.wrapped import DTYPES, clip, cut, mesh_of, optimizer_of, unsynced, whole, wrapped
from ullage.train.scaling import scaler_of
from ullage.train.states import states_of


@dataclass(kw_only=True)
class Stepped:
    """loss: mean over this rank's micro-batches. grad_norm: before clipping. skipped: fp16 gradients overflowed."""

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    skipped: bool = False


@dataclass(kw_only=True)
class Run:
    """A job's model and optimizer on this rank. parameters: by name, as the optimizer steps them (shards where they are sharded)."""

    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    device: torch.device

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name.removeprefix("module."): param for name, param in self.model.named_parameters()}

    def step(self, micro_batches: Sequence[torch.Tensor]) -> Stepped:
        """One optimizer step from (micro_batch, seq_len) token tensors, one for each micro-batch."""
        with kernels(self.job):
            total = self._passes(micro_batches)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = self._clip() if self.job.grad_clip else None
        skipped = self._update()
        self.optimizer.zero_grad(set_to_none=True)
        return Stepped(loss=total, grad_norm=norm, skipped=skipped)

    def mean_loss(self, stepped: Stepped) -> float:
        """Over all ranks; every rank calls it."""
        return self.over_ranks(stepped)[0]

    def over_ranks(self, stepped: Stepped, *figures: float) -> tuple[float, ...]:
        """The loss, mean over all ranks, and of each figure the highest of any, in one exchange; every rank calls it."""
        mine = torch.tensor(figures, dtype=torch.float64, device=self.device)
        mine = torch.cat([stepped.loss.detach().double().reshape(1), mine])
        if self.job.layout.world > 1:
            all_of = mine.new_empty(self.job.layout.world, len(mine))
            distributed.all_gather(list(all_of), mine)
            loss = all_of[:, 0].sum() / (
                self.job.layout.world // self.job.layout.pp
            )  # the ranks that hold the last stage
            mine = torch.cat([loss.reshape(1), all_of[:, 1:].amax(0)])
        return tuple(mine.tolist())

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole parameters on the CPU, by the name that they have on one device; every rank calls it."""
        return {name: whole(param.detach()).cpu().clone() for name, param in self.parameters.items()}

    def states(self, *, made: bool = False) -> dict[str, Any]:
        """What a checkpoint has of the run on this rank (states.py). ZeRO-1's owners have states of their own parameters alone."""
        return states_of(self.model, getattr(self.optimizer, "optim", self.optimizer), made=made)

    def restored(self) -> None:
        """Called once ``states`` have been written into."""

    def _passes(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Forwards and backwards of a step; the mean of its losses."""
        count = len(micro_batches)
        total: torch.Tensor | None = None
        for number, ids in enumerate(micro_batches, 1):
            with unsynced(self.job, self.model, last=number == count), _cast(self.job, self.model):
                loss = self._forward(ids.to(self.device)) / count
                torch.autograd.backward(self.scaler.scale(loss) if self.scaler is not None else loss)
            total = loss.detach() if total is None else total + loss.detach()
            del loss
        assert total is not None, "a step has micro-batches"
        return total

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        with autocast(self.job, self.device.type):
            loss: torch.Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    def _clip(self) -> torch.Tensor:
        return clip(self.model)

    def _update(self) -> bool:
        if self.scaler is None:
            self.optimizer.step()
            return False
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() < before


def run_of(
    job: Job, *, seed: int = 0, lr: float = 1e-4, weight_decay: float = 0.01, weights: Path | None = None
) -> Run:
    """The job on this rank; where it has several, the process group is there. The seed's weights are the same on every rank."""
    from ullage.train.ranks import current_device

    device = current_device()
    if job.engine.name == "deepspeed":
        from ullage.train import deepspeed

        torch.manual_seed(seed)
        return deepspeed.run_of(job, device=device, lr=lr, weight_decay=weight_decay, weights=weights)
    job = unwrapped(job) or job
    mesh = mesh_of(job, device.type)

    def bare() -> nn.Module:
        torch.manual_seed(seed)
        model = build(job, weights)
        if stepped_in(job) != job.precision.params:
            model = model.to(DTYPES[stepped_in(job)])
        if job.layout.tp > 1:
            cut(model, mesh["tp"], along_the_sequence=job.layout.sp)
        return model

    if job.layout.pp > 1:
        from ullage.train.pipelined import pipelined

        def optimizer_for(stages: nn.Module) -> torch.optim.Optimizer:
            return with_rates(optimizer_of(job, stages), lr, weight_decay)

        return pipelined(job, bare, mesh, optimizer_for, device)
    model = bare()
    if mesh is None or job.layout.dp == 1:  # FSDP2 moves each shard by itself
        model = model.to(device)
    model = wrapped(job, model, mesh)
    optimizer = with_rates(optimizer_of(job, model), lr, weight_decay)
    return Run(job=job, model=model, optimizer=optimizer, scaler=scaler_of(job, device), device=device)


def with_rates(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["lr"] = lr
        if "weight_decay" in group:
            group["weight_decay"] = weight_decay
    return optimizer


def stepped_in(job: Job) -> str:
    """The type of the parameters that the optimizer steps: of masters beside 16-bit ones theirs, which begin as these."""
    return job.precision.master or job.precision.params


def alone(job: Job) -> Job:
    """The same step on one device: all ranks' micro-batches, one after the other."""
    data = replace(job.data, grad_accum=job.data.grad_accum * job.layout.dp)
    momentum = {name: value for name, value in job.engine.options.items() if name == "momentum"}
    engine = Engine(name="single", options=FrozenMap(momentum))
    precision = (unwrapped(job) or job).precision
    return replace(job, layout=Layout(), engine=engine, data=data, precision=precision)


@contextmanager
def _cast(job: Job, model: nn.Module) -> Iterator[None]:
    """On one device, whole parameters in the type that the ranks compute in, FSDP2's by policy and DeepSpeed's beside masters, until the
    backward is through (it may recompute)."""
    precision = job.precision
    if job.engine.name != "single" or precision.autocast or stepped_in(job) == precision.compute:
        yield
        return
    cast = {param: param.to(DTYPES[precision.compute]) for param in model.parameters()}
    held = [module._parameters for module in model.modules()]
    before = [dict(params) for params in held]
    for params in held:
        params.update({name: cast[param] for name, param in params.items() if param is not None})  # type: ignore[misc]
    try:
        yield
    finally:
        for params, own in zip(held, before, strict=True):
            params.update(own)


@contextmanager
def kernels(job: Job) -> Iterator[None]:
    """attention: math is one of sdpa's kernels; which of the others runs is torch's choice."""
    context: AbstractContextManager[Any] = nullcontext()
    if job.attention == "math":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context = sdpa_kernel(SDPBackend.MATH)
    with context:
        yield
