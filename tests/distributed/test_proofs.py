"""Each technique on real ranks is one device: losses, gradient norms and final weights, from the same seed on the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.distributed.training import IMPORTS, all_proved, job_of
from tests.distributed.world import context, run

from ullage.train.answers import Proof
from ullage.train.settings import Settings

STEPS = 20
TIMEOUT_S = 300.0
FOUR = {
    "HSDP": job_of("fsdp2", 4, shard_group=2),
    "ZeRO-3": job_of("fsdp2", 4, data={"grad_accum": 1}),
}
TWO = {
    "DDP": job_of("ddp", 2),
    "DDP, views": job_of("ddp", 2, options={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
    "ZeRO-1": job_of("zero1", 2),
    "ZeRO-2": job_of("fsdp2", 2, zero_stage=2),
    "ZeRO-3": job_of("fsdp2", 2),
    "ZeRO-3, each batch reduced": job_of("fsdp2", 2, options={"sync_each_batch": True}),
    "ZeRO-3, tied": job_of("fsdp2", 2, model={"tie_word_embeddings": True}),
    "full recomputation": job_of("fsdp2", 2, recompute="full"),
    "every second layer": job_of("ddp", 2, recompute={"every": 2}),
    "the first two layers": job_of("fsdp2", 2, recompute={"layers": 2}),
    "eager": job_of("fsdp2", 2, attention="eager"),
    "math": job_of("ddp", 2, attention="math"),
    "no clipping, SGD": job_of(
        "fsdp2", 2, grad_clip=False, optimizer={"name": "sgd", "impl": "foreach"}, options={"momentum": 0.9}
    ),
    "for-loop AdamW": job_of("zero1", 2, optimizer={"name": "adamw", "impl": "for-loop"}),
    "DDP, bf16": job_of("ddp", 2, precision="bf16-mixed"),
    "ZeRO-3, bf16": job_of("fsdp2", 2, precision="bf16-mixed"),
    "ZeRO-1, fp16": job_of("zero1", 2, precision="fp16-mixed"),
    "ZeRO-3, fp16": job_of("fsdp2", 2, precision="fp16-mixed"),
}


@pytest.fixture(scope="module")
def proofs() -> dict[int, dict[str, Proof]]:
    """Of all jobs of a world, by its ranks: its processes are started once."""
    settings = Settings(steps=STEPS, lr=1e-3)
    return {
        ranks: run(context(*IMPORTS), all_proved, (jobs, settings), ranks=ranks, timeout_s=TIMEOUT_S)[0]
        for ranks, jobs in ((2, TWO), (4, FOUR))
    }


@pytest.mark.parametrize(("ranks", "name"), [*((2, name) for name in TWO), *((4, name) for name in FOUR)])
def test_ranks_are_one_device(ranks: int, name: str, proofs: dict[int, dict[str, Proof]]) -> None:
    found = proofs[ranks][name]
    assert isinstance(found, Proof), found
    assert len(found.rows) == STEPS
    assert found.equal, f"{replace(found, rows=())}\n{found.rows[-1]}"
    assert found.rows[0].loss != found.rows[-1].loss
