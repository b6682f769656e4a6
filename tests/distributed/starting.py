"""What a written file makes of real processes: DeepSpeed initialised from its JSON, and a step with it."""

from __future__ import annotations

import json
import warnings
from typing import Any, NamedTuple

from tests.distributed.deepspeed_runs import _quiet, _without_extensions


class Started(NamedTuple):
    """What DeepSpeed's engine says of itself, and the loss of one step."""

    stage: int
    micro_batch: int
    grad_accum: int
    batch: int
    bf16: bool
    clipping: float
    optimizer: str
    loss: float


def initialise(text: str) -> Started:
    """As one rank of the process group: deepspeed.initialize with this configuration alone, and as many micro-batches as it says."""
    with warnings.catch_warnings():
        _quiet()
        _without_extensions()
        import deepspeed
        import torch

        configuration: dict[str, Any] = json.loads(text)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=configuration, dist_init_required=False
        )
        loss = torch.zeros(())
        for _ in range(engine.gradient_accumulation_steps()):
            given = torch.ones(
                engine.train_micro_batch_size_per_gpu(), 16, dtype=next(engine.module.parameters()).dtype
            )
            loss = engine(given).float().square().mean()
            engine.backward(loss)
            engine.step()
        return Started(
            stage=engine.zero_optimization_stage(),
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            grad_accum=engine.gradient_accumulation_steps(),
            batch=engine.train_batch_size(),
            bf16=engine.bfloat16_enabled(),
            clipping=engine.gradient_clipping(),
            optimizer=type(engine.basic_optimizer).__name__,
            loss=loss.item(),
        )
