"""Techniques on small jobs, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ullage
from ullage.techniques.told import Shown

BASE = {
    "model": "llama-3.1-8b",
    "cluster": "8xH100-SXM-80GB",
    "data": {"seq_len": 2048, "micro_batch": 1, "grad_accum": 4},
}
MEGATRON = BASE | {"stack": "megatron", "engine": {"name": "megatron", "zero_stage": 1}}

Show = Callable[..., Shown]


@pytest.fixture
def show() -> Show:
    def show(technique: str, base: dict = BASE, *, stage: int | None = None, **changes: object) -> Shown:
        return ullage.show(technique, ullage.read_job(base | changes), stage=stage)

    return show
