"""What transformers' Trainer holds of an evaluation's logits."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


@pytest.mark.parametrize("batches", [1, 3, 6])
def test_logits_are_there_twice_when_a_batch_is_joined(batches: int) -> None:
    """engines/moments.py: n batches need 2n tensors of logits, the first but one."""
    from transformers.trainer_pt_utils import EvalLoopContainer

    numel = 2 * 64 * 1024
    container = EvalLoopContainer()  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        for _ in range(batches):
            logits = torch.zeros(2, 64, 1024)
            container.add(logits)  # type: ignore[no-untyped-call]
    live = highest = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    assert highest == pytest.approx((2 * batches if batches > 1 else 1) * numel * 4, rel=0.01)
