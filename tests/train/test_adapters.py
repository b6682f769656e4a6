"""A run with adapters trains them and nothing else; what a run of CPUs cannot show is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.training import job_of

from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.train.batches import micro_batches, tokens_of
from ullage.train.composed import run_of
from ullage.train.measured import measure
from ullage.train.proof import prove
from ullage.train.settings import Settings


def job(**lora: Any) -> Job:
    return job_of("single", 1, lora={"rank": 4, **lora}, precision="bf16-mixed")


def test_adapters_alone_are_trained() -> None:
    made = job(dropout=0.1)
    run = run_of(made)
    before = run.weights()
    for step in range(2):  # A has a gradient once B is not zero any more
        run.step(micro_batches(made, tokens_of(made, Settings()), step))
    after = run.weights()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert len(moved) == 2 * 2 * 3  # A and B of q_proj and v_proj, in three layers


def test_dropout_is_not_proved_and_on_cpus_not_measured() -> None:
    with pytest.raises(Unsupported, match="each rank drops"):
        prove(job(dropout=0.1), Settings(steps=1))
    with pytest.raises(Unsupported, match="keeps its mask"):
        measure(job(dropout=0.1), Settings(steps=1))


def test_what_is_on_the_host_is_not_measured_on_cpus() -> None:
    with pytest.raises(Unsupported, match="one memory"):
        measure(job_of("fsdp2", 2, offload={"params": "cpu", "optimizer": "cpu"}), Settings(steps=1))
