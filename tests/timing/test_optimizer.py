"""Bytes of an optimizer's step, by what its kernels read and write."""

from __future__ import annotations

from typing import Any

import pytest

from ullage.engines.registry import ranks_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.timing.machine import moved_s
from ullage.timing.optimizer import optimizer_s, stepped
from ullage.timing.partly import Trained

GRADIENT, MASTER, MOMENTS, PARAMETER = 4, 2 * 4, 2 * 2 * 4, 2
CLIPPED = 3 * 4  # read for the norm, read and written


@pytest.mark.parametrize(
    ("options", "copied"), [({}, 4 + PARAMETER), ({"use_precision_aware_optimizer": True}, PARAMETER)]
)
def test_a_master_is_read_again_for_its_parameter(options: dict[str, Any], copied: int) -> None:
    """Megatron-Core optimizer/distrib_optimizer.py, _copy_main_params_to_model_params: a copy after the step, which the precision-aware
    optimizer does in it."""
    engine = {"name": "megatron", "zero_stage": 1, "options": options}
    job = read_job(
        {
            "model": "llama-3.2-1b",
            "cluster": "2xH100-SXM-80GB",
            "stack": "megatron",
            "engine": engine,
            "grad_clip": True,
        }
    )
    held = Trained(rank=ranks_of(job, graph_of(job))[0])
    moved = stepped(job, held) * (GRADIENT + MASTER + MOMENTS + copied + CLIPPED)
    assert optimizer_s(job, held) == pytest.approx(moved_s(job.cluster.device, moved, "optimizer"))
