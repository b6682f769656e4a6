"""Dynamic loss scaling of fp16: torch's GradScaler, and one that has all axes agree on an overflow."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from ullage.job.job import Job


def scaler_of(job: Job, device: torch.device) -> torch.amp.GradScaler | None:
    """None where nothing is computed in fp16. torch's own agrees over the shards of one mesh, and takes no DTensors of several."""
    if "fp16" not in (job.precision.compute, job.precision.params):
        return None
    kind = _Agreeing if job.layout.tp * job.layout.pp > 1 else torch.amp.GradScaler
    scaler = kind(device.type)
    scaler.scale(torch.zeros((), device=device))  # a stage without a loss has a scale too
    return scaler


class _Agreeing(torch.amp.GradScaler):
    """Each rank looks at its own parts of the gradients; where any overflowed, every rank leaves the step out."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads: list[Any] = [
            getattr(param.grad, "_local_tensor", param.grad) for param in params if param.grad is not None
        ]
        found_inf = found_inf.clone()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        distributed.all_reduce(found_inf)
        return {found_inf.device: found_inf}
