"""An overflow on one rank of a pipeline or of a tensor-parallel group: none steps, and all halve their scale."""

from __future__ import annotations

import pytest
from tests.distributed.training import job_of
from tests.distributed.world import run


def _stepped() -> tuple[float, float, float]:
    """Of a weight of 1 with a gradient of 1, or infinite on rank 1: its value after a step, and the scale before and after."""
    import torch
    from torch import distributed

    from ullage.train.scaling import scaler_of

    scaler = scaler_of(job_of("fsdp2", 2, layout={"tp": 2}, precision="fp16-mixed"), torch.device("cpu"))
    assert scaler is not None
    before = scaler.get_scale()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.tensor([torch.inf if distributed.get_rank() else 1.0])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return float(weight.detach()), before, scaler.get_scale()


def test_all_ranks_leave_out_a_step_that_overflowed_on_one() -> None:
    for weight, before, after in run(_stepped, (), ranks=2, timeout_s=100):
        assert weight == 1
        assert after == pytest.approx(before / 2)
