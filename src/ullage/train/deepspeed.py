"""A job under DeepSpeed's engine: made from the configuration that ``ullage convert --to deepspeed`` writes, and stepped by it.

On CPU processes three things differ from a GPU's. DeepSpeed's own Adams are C++ and CUDA extensions that are compiled at first use:
torch's AdamW takes their place, by the same rule. Its shared-memory collectives are compiled too: gloo alone is used. And its accelerator
refuses fp16 where oneDNN has no fast kernels for it: torch has slow ones.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from ullage.errors import UllageError
from ullage.formats import deepspeed as configuration
from ullage.formats.tree import nested
from ullage.job.job import Job
from ullage.trace.models import build
from ullage.trace.patch import replaced
from ullage.trace.wrapped import optimizer_of
from ullage.train.composed import Run, Stepped, kernels, with_rates
from ullage.train.partitions import Partitions
from ullage.train.states import states_of

_DEPRECATED = r"`torch\.distributed\.\w+` is deprecated"
"""DeepSpeed calls collectives by names that torch has renamed."""
_OF_EVERY_RUN = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": sys.maxsize,
}


@dataclass(kw_only=True)
class DeepSpeedRun(Run):
    """model: DeepSpeed's engine, which clips, scales losses and steps by itself. optimizer: the one that it wraps.

    linear: torch's function as the engine wants it, which under ZeRO-3 replaces it for the whole process. partitions: None without ZeRO.
    """

    model: Any
    scaler: Any
    linear: Any
    partitions: Partitions | None

    def step(self, micro_batches: Sequence[torch.Tensor]) -> Stepped:
        total = torch.zeros((), device=self.device)
        norm = None
        with kernels(self.job), replaced(nn.functional, "linear", self.linear):
            for number, ids in enumerate(micro_batches, 1):
                ids = ids.to(self.device)
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                total += loss.detach() / len(micro_batches)
                self.model.backward(loss)
                del loss
                if number == len(micro_batches) and self.job.engine.zero_stage == 0:
                    norm = self._norm()
                self._stepped()
        skipped = not self.model.was_step_applied()
        if skipped and self.scaler is not None and self.scaler.fixed:
            raise UllageError(
                f"fp16 overflows at a loss scale of {self.scaler.get_scale():g}, which is fixed",
                remedy="leave engine.options.loss_scale out: it is dynamic then",
            )
        if norm is None:
            norm = torch.as_tensor(math.inf if skipped else self.model.get_global_grad_norm())
        return Stepped(loss=total, grad_norm=norm if self.job.grad_clip else None, skipped=skipped)

    def _stepped(self) -> None:
        try:
            self.model.step()
        except Exception as error:  # DeepSpeed raises no narrower kind (runtime/fp16/loss_scaler.py, update_scale)
            if "loss scale already at minimum" not in str(error):
                raise
            raise UllageError(f"fp16 overflows at DeepSpeed's least loss scale, {self.scaler.get_scale():g}") from None

    def _norm(self) -> torch.Tensor:
        """Without ZeRO the engine clips by a norm that it does not tell."""
        return torch.nn.utils.get_total_norm([one.grad for one in self.parameters.values() if one.grad is not None])

    def states(self, *, made: bool = False) -> dict[str, Any]:
        if self.partitions is not None:
            return self.partitions.states(made=made)
        return states_of(self.model.module, self.optimizer, made=made)

    def restored(self) -> None:
        if self.partitions is not None:
            self.partitions.restored()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: _whole(param).detach().cpu().clone() for name, param in self.parameters.items()}


class _Scaler:
    """DeepSpeed's loss scaler, asked as the loop asks torch's."""

    _KEPT = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self.fixed: bool = not scaler.dynamic

    def get_scale(self) -> float:
        return float(self._scaler.cur_scale)

    def state_dict(self) -> dict[str, float]:
        return {name: getattr(self._scaler, name) for name in self._KEPT if hasattr(self._scaler, name)}

    def load_state_dict(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            setattr(self._scaler, name, value)


def _whole(param: nn.Parameter) -> torch.Tensor:
    """The master, gathered from all ranks; without ZeRO the parameter is one."""
    from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-untyped]
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-untyped]

    found: torch.Tensor | None = safe_get_full_fp32_param(param)
    if found is not None:
        return found
    with GatheredParameters([param]):  # frozen, so that it has no master
        return param.detach().clone()


def run_of(job: Job, *, device: torch.device, lr: float, weight_decay: float, weights: Path | None) -> Run:
    """The job on this rank, its weights drawn from torch's generator as it stands."""
    own = job.optimizer.impl == "fused" and device.type == "cuda" and job.optimizer.name in ("adamw", "adam")
    bare = build(job, weights)
    _prepare(device)
    import deepspeed  # type: ignore[import-untyped]

    rates = {"lr": lr, "weight_decay": weight_decay, "adam_w_mode": job.optimizer.name == "adamw"}
    client = None if own else with_rates(optimizer_of(job, bare), lr, weight_decay)
    for group in client.param_groups if client is not None else ():
        group["params"] = [param for param in group["params"] if param.requires_grad]  # it flattens what it is given
    trained = [param for param in bare.parameters() if param.requires_grad]
    keys = {path: value for path, value in configuration.leaves(job).items() if path[0] != "optimizer" or own}
    keys |= {("optimizer", "params", name): value for name, value in rates.items() if own}
    keys |= {(name,): value for name, value in _OF_EVERY_RUN.items()}
    with replaced(nn.functional, "linear", nn.functional.linear):
        engine, *_ = deepspeed.initialize(model=bare, model_parameters=trained, optimizer=client, config=nested(keys))
        linear = nn.functional.linear
    return DeepSpeedRun(
        job=job,
        model=engine,
        optimizer=engine.basic_optimizer,
        scaler=_Scaler(engine.optimizer.loss_scaler) if job.precision.compute == "fp16" else None,
        device=device,
        linear=linear,
        partitions=Partitions(engine) if job.engine.zero_stage else None,
    )


def _prepare(device: torch.device) -> None:
    """What DeepSpeed wants to find in this process, and what it must not do."""
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    warnings.filterwarnings("ignore", message=_DEPRECATED)
    from deepspeed.accelerator import get_accelerator  # type: ignore[import-untyped]

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        backend: Any = import_module("deepspeed.comm.torch")  # by its name: the package has torch itself under it
        backend.build_shm_op = lambda: None
        get_accelerator().is_fp16_supported = lambda: True
    if not distributed.is_initialized():  # one rank: DeepSpeed wants a group all the same
        store = distributed.HashStore()  # type: ignore[attr-defined]
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # checkpoints are written on the host
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
