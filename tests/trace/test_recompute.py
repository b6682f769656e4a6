"""Recomputation of groups of layers and of parts of them: the closed form against the code that runs it, one whole step."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.training import job_of

from ullage.engines.estimate import estimate
from ullage.memory.ledger import by_category
from ullage.trace.whole import traced

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module"
)  # of DTensor's views: nobody changes them in place

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("single", 1, {"recompute": {"sqrt": True}}),
    ("single", 1, {"recompute": {"modules": ["mlp"]}, "precision": "bf16-mixed"}),
    ("fsdp2", 2, {"recompute": {"sqrt": True}, "model": {"num_hidden_layers": 9}, "data": {"grad_accum": 1}}),
    ("fsdp2", 2, {"recompute": {"sqrt": True}, "precision": "bf16-mixed"}),
    ("fsdp2", 2, {"recompute": {"modules": ["mlp"]}}),
    ("fsdp2", 2, {"recompute": "selective"}),
]


@pytest.mark.parametrize(("engine", "ranks", "keys"), CASES, ids=str)
def test_a_step_is_what_runs(engine: str, ranks: int, keys: dict[str, Any]) -> None:
    job = job_of(engine, ranks, **keys)
    answer = estimate(job)
    closed = answer.peak.allocated_bytes - by_category(answer.ledger).get("workspace", 0)
    assert closed == pytest.approx(traced(job).steady.bytes, rel=0.01)
