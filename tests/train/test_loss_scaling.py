"""What loss scaling is for: gradients below fp16's smallest number are zero without it, and come through with it."""

from __future__ import annotations

import torch
from tests.distributed.training import job_of

from ullage.train.batches import micro_batches, tokens_of
from ullage.train.composed import run_of
from ullage.train.settings import Settings

HEAD = 1e-4
"""The head's weights are so much smaller: whatever passes back through it is."""
SGD = {"name": "sgd", "impl": "foreach"}


def gradients(precision: str, *, scaled: bool = True) -> torch.Tensor:
    """Those of the layers in one step, as the optimizer met them: its first momentum."""
    job = job_of("single", 1, precision=precision, optimizer=SGD, options={"momentum": 0.9}, grad_clip=False)
    run = run_of(job, weight_decay=0.0)
    if not scaled:
        assert run.scaler is not None
        run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    with torch.no_grad():
        run.parameters["lm_head.weight"].mul_(HEAD)
    assert not run.step(micro_batches(job, tokens_of(job, Settings()), 0)).skipped
    layers = [param for name, param in run.parameters.items() if ".layers." in name]
    return torch.cat([run.optimizer.state[param]["momentum_buffer"].flatten() for param in layers])


def test_without_loss_scaling_gradients_underflow() -> None:
    exact, lost, kept = gradients("fp32"), gradients("fp16-mixed", scaled=False), gradients("fp16-mixed")
    assert exact.all()
    assert (lost == 0).float().mean() > 0.25
    assert (kept == 0).float().mean() < 0.001
    assert _apart(lost, exact) > 0.9
    assert _apart(kept, exact) < 0.02


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
