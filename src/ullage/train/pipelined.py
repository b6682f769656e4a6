"""A job as torch.distributed.pipelining runs it: this rank's stages, each under FSDP2, and a schedule over the micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from ullage.job.job import Job
from ullage.memory.rank import placed
from ullage.trace.wrapped import DTYPES, clip, wrapped
from ullage.train.composed import Run
from ullage.train.reach import HALVED, SCHEDULES
from ullage.train.scaling import scaler_of
from ullage.train.staged import staged
from ullage.train.states import states_of


@dataclass(kw_only=True)
class Pipelined(Run):
    """model: this rank's stages, a list of them; where the last is not among them a step's loss is 0. pipeline: the group of its ranks.

    first: whether the first stage is here. embedding, head: copies here of one weight that both ends of the pipeline use. ends: the group
    of the two ranks that hold them.
    """

    pipeline: Any
    schedule: Any
    first: bool
    embedding: list[nn.Parameter]
    head: list[nn.Parameter]
    ends: Any

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return _parameters(self.model)

    def states(self, *, made: bool = False) -> dict[str, Any]:
        """A copy of a tied weight goes by the name of the embedding, at either end."""
        tied = _tied(self.model)

        def named(name: str) -> str:
            of_stage = name.partition(".")[2]
            return tied.get(of_stage, of_stage)

        return states_of(self.model, self.optimizer, made=made, named=named)

    @torch.no_grad()
    def restored(self) -> None:
        """Where both copies are here, of a V, one has been written into: the head's, which comes later."""
        for embedding, head in zip(self.embedding, self.head, strict=False):
            embedding.copy_(head)
            for key, value in self.optimizer.state[head].items():
                self.optimizer.state[embedding][key].copy_(value)

    def weights(self) -> dict[str, torch.Tensor]:
        stages: list[dict[str, torch.Tensor]] = [{}] * self.job.layout.pp
        distributed.all_gather_object(stages, super().weights(), group=self.pipeline)
        tied = _tied(self.model)
        return {name: weight for stage in stages for name, weight in stage.items() if name not in tied}

    def _passes(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        ids = torch.cat([one.to(self.device) for one in micro_batches])
        losses: list[torch.Tensor] = []
        self.schedule.step(*([ids] if self.first else []), target=ids, labels=ids, losses=losses, return_outputs=False)
        self._join()
        if not losses:
            return torch.zeros((), device=self.device)
        total = torch.stack(losses).detach().sum()
        return total if self.scaler is None else total / self.scaler.get_scale()

    @torch.no_grad()
    def _join(self) -> None:
        """Each copy of a tied weight gets the other's gradient too, as Megatron's do (core/distributed/finalize_model_grads.py)."""
        grads: list[Any] = [param.grad for param in (*self.embedding, *self.head)]
        if len(grads) == 2:  # of a V
            grads[0].add_(grads[1])
            grads[1].copy_(grads[0])
        elif grads:
            distributed.all_reduce(grads[0].to_local(), group=self.ends)

    def _clip(self) -> torch.Tensor:
        return clip(self.model, self.pipeline, self.head)


def pipelined(
    job: Job,
    bare: Callable[[], nn.Module],
    mesh: Any,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    device: torch.device,
) -> Pipelined:
    """bare: makes a whole model, once for each stage of this rank."""
    pipeline = mesh["pp"]
    numbers = placed(job.layout, pipeline.get_local_rank())
    model = nn.ModuleList(wrapped(job, staged(job, bare(), number), mesh) for number in numbers)
    tied, found = _tied(model), _parameters(model)
    ends = mesh.mesh[[0, -1]].flatten(1).T.tolist()
    scaler = scaler_of(job, device)
    return Pipelined(
        job=job,
        model=model,
        optimizer=optimizer(model),
        scaler=scaler,
        device=device,
        pipeline=pipeline.get_group(),
        schedule=_schedule(job, dict(zip(numbers, model, strict=True)), pipeline.get_group(), device, scaler),
        first=0 in numbers,
        embedding=[found[name] for name in tied.values() if name in found],
        head=[found[name] for name in tied if name in found],
        ends=distributed.new_subgroups_by_enumeration(ends)[0] if tied else None,  # type: ignore[no-untyped-call]
    )


def _tied(stages: Any) -> dict[str, str]:
    """Names of weights that are another's: the head's, and the embedding's for it."""
    found: dict[str, str] = stages[0].all_tied_weights_keys
    return found


def _parameters(stages: nn.Module) -> dict[str, nn.Parameter]:
    return {name.partition(".")[2]: param for name, param in stages.named_parameters()}


def _schedule(
    job: Job, stages: Mapping[int, Any], group: Any, device: torch.device, scaler: torch.amp.GradScaler | None
) -> Any:
    """torch's schedule of that name. The stages are told what they receive and return, so that none runs to find out."""
    from torch.distributed import pipelining

    data, count = job.data, job.layout.pp * job.layout.vpp
    ids = torch.empty((data.micro_batch, data.seq_len), dtype=torch.long, device="meta")
    width = next(iter(stages.values())).config.get_text_config().hidden_size
    compute = DTYPES[job.precision.compute]
    hidden = torch.empty((*ids.shape, width), dtype=compute, device="meta", requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    made = [
        pipelining.PipelineStage(
            stage,
            number,
            count,
            device,
            input_args=hidden if number else ids,
            output_args=hidden if number < count - 1 else loss,
            group=group,
        )
        for number, stage in stages.items()
    ]

    def share(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        mean = loss / data.grad_accum
        return mean if scaler is None else scaler.scale(mean)

    kind = getattr(pipelining, SCHEDULES[job.layout.schedule])
    several = len(made) > 1 or job.layout.schedule in HALVED
    return kind(
        made if several else made[0],
        data.grad_accum,
        loss_fn=share,
        scale_grads=False,
    )
