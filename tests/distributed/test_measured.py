"""What each technique's ranks really hold, against the estimate: the highest bytes of a steady step, within 2 %."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.training import BUCKETS, STAGE_3, all_measured, job_of
from tests.distributed.world import run

from ullage.job.job import Job
from ullage.train.answers import Measured
from ullage.train.settings import Settings

pytestmark = pytest.mark.xdist_group("measured")  # one worker, so that its processes are started once
TIMEOUT_S = 600.0
MODEL = {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32, "num_hidden_layers": 4, "vocab_size": 1000}
DATA = {"seq_len": 64, "micro_batch": 2, "grad_accum": 2}
FOUR_BATCHES = {**DATA, "grad_accum": 4}
IN_PLACE = {"reduce_in_place": True}
LARGE = {"hidden_size": 256, "intermediate_size": 1100, "vocab_size": 4096, "tie_word_embeddings": True}
"""Some of its gradients are reduced by themselves."""
RESHARDED = {"reshard_after_forward": "always"}
TP, PP = {"tp": 2}, {"pp": 2}
SP = {**TP, "sp": True}


def job(engine: str, ranks: int = 2, **keys: Any) -> Job:
    model = {**MODEL, **keys.pop("model", {})}
    return job_of(engine, ranks, model=model, **{"data": DATA, **keys})


CASES = {
    "DDP": job("ddp"),
    "DDP, views": job("ddp", options={"gradient_as_bucket_view": True}),
    "DDP, in place": job("ddp", options=IN_PLACE),
    "DDP, in place, one micro-batch": job("ddp", options=IN_PLACE, data={**DATA, "grad_accum": 1}),
    "DDP, in place, casts once, tied, large": job(
        "ddp", options={**IN_PLACE, "cast_once": True}, model=LARGE, precision="bf16-mixed"
    ),
    "DDP, in place, adapters": job("ddp", options=IN_PLACE, lora={"rank": 8}, precision="bf16-mixed"),
    "ZeRO-1": job("zero1"),
    "ZeRO-1, in place": job("zero1", options=IN_PLACE),
    "ZeRO-2": job("fsdp2", zero_stage=2),
    "ZeRO-3": job("fsdp2"),
    "ZeRO-3, one micro-batch": job("fsdp2", data={**DATA, "grad_accum": 1}),
    "full recomputation": job("fsdp2", recompute="full"),
    "every second layer": job("ddp", recompute={"every": 2}),
    "the first two layers": job("fsdp2", recompute={"layers": 2}),
    "groups of layers": job("fsdp2", recompute={"sqrt": True}),
    "MLPs alone, bf16": job("ddp", recompute={"modules": ["mlp"]}, precision="bf16-mixed"),
    "by op": job("fsdp2", recompute="selective"),
    "by op, bf16": job("ddp", recompute="selective", precision="bf16-mixed"),
    "eager": job("ddp", attention="eager"),
    "math": job("ddp", attention="math"),
    "no clipping, SGD": job("fsdp2", grad_clip=False, optimizer={"name": "sgd", "impl": "foreach"}),
    "foreach": job("ddp", optimizer={"name": "adamw", "impl": "foreach"}),
    "DDP, bf16": job("ddp", precision="bf16-mixed"),
    "ZeRO-3, bf16": job("fsdp2", precision="bf16-mixed"),
    "ZeRO-1, fp16": job("zero1", precision="fp16-mixed"),
    "ZeRO-3, fp16": job("fsdp2", precision="fp16-mixed"),
    "all in bf16": job("fsdp2", precision="bf16"),
    "TP": job("fsdp2", layout=TP),
    "TP, full recomputation": job("fsdp2", layout=TP, recompute="full"),
    "TP, by op": job("fsdp2", layout=TP, recompute="selective"),
    "TP, bf16": job("fsdp2", layout=TP, precision="bf16-mixed"),
    "TP along the sequence": job("fsdp2", layout=SP),
    "TP along the sequence, full recomputation, bf16": job(
        "fsdp2", layout=SP, recompute="full", precision="bf16-mixed"
    ),
    "TP along the sequence, by op": job("fsdp2", layout=SP, recompute="selective"),
    "TP along the sequence, MLPs alone": job("fsdp2", layout=SP, recompute={"modules": ["mlp"]}),
    "GPipe": job("fsdp2", layout={**PP, "schedule": "gpipe"}, data=FOUR_BATCHES),
    "GPipe, resharded": job("fsdp2", layout={**PP, "schedule": "gpipe"}, data=FOUR_BATCHES, options=RESHARDED),
    "1F1B": job("fsdp2", layout=PP, data=FOUR_BATCHES),
    "1F1B, every second layer": job("fsdp2", layout=PP, data=FOUR_BATCHES, recompute={"every": 2}),
    "1F1B, bf16": job("fsdp2", layout=PP, data=FOUR_BATCHES, precision="bf16-mixed"),
    "interleaved 1F1B": job("fsdp2", layout={**PP, "vpp": 2, "schedule": "interleaved-1f1b"}, data=FOUR_BATCHES),
    "zero bubble": job("fsdp2", layout={**PP, "schedule": "zb-h1"}, data=FOUR_BATCHES),
    "zero bubble in a V": job("fsdp2", layout={**PP, "schedule": "zbv"}, data=FOUR_BATCHES),
    "zero bubble in a V, bf16": job(
        "fsdp2", layout={**PP, "schedule": "zbv"}, data=FOUR_BATCHES, precision="bf16-mixed"
    ),
    "DualPipe in a V": job("fsdp2", layout={**PP, "schedule": "dualpipev"}, data=FOUR_BATCHES),
    "DualPipe in a V, bf16": job(
        "fsdp2", layout={**PP, "schedule": "dualpipev"}, data=FOUR_BATCHES, precision="bf16-mixed"
    ),
    "adapters": job("ddp", lora={"rank": 8}, precision="bf16-mixed"),
    "adapters of a base in bf16": job(
        "ddp", lora={"rank": 8, "targets": "all-linear"}, precision="bf16", recompute="full"
    ),
    "adapters on shards": job("fsdp2", lora={"rank": 8}, precision="bf16-mixed"),
    "DeepSpeed": job("deepspeed", zero_stage=0),
    "DeepSpeed ZeRO-1": job("deepspeed", zero_stage=1, options=BUCKETS),
    "DeepSpeed ZeRO-1, bf16, summed in fp32": job(
        "deepspeed", zero_stage=1, options={**BUCKETS, "grad_accum_dtype": "fp32"}, precision="bf16-mixed"
    ),
    "DeepSpeed ZeRO-2, fp16": job("deepspeed", zero_stage=2, options=BUCKETS, precision="fp16-mixed"),
    "DeepSpeed ZeRO-3, bf16": job("deepspeed", zero_stage=3, options=STAGE_3, precision="bf16-mixed"),
    "DeepSpeed ZeRO-3, one micro-batch": job(
        "deepspeed", zero_stage=3, options=STAGE_3, data={**DATA, "grad_accum": 1}, recompute={"sqrt": True}
    ),
}
FOUR = {
    "HSDP": job("fsdp2", 4, shard_group=2),
    "ZeRO-3 on four": job("fsdp2", 4),
    "ZeRO-3 x TP": job("fsdp2", 4, layout=TP),
    "ZeRO-3 x TP along the sequence": job("fsdp2", 4, layout=SP),
    "ZeRO-3 x PP, one layer of a stage": job("fsdp2", 4, layout=PP, data=FOUR_BATCHES, recompute={"layers": 1}),
    "TP x PP": job("fsdp2", 4, layout={**TP, **PP}, data=FOUR_BATCHES),
    "TP x PP, full recomputation": job("fsdp2", 4, layout={**TP, **PP}, data=FOUR_BATCHES, recompute="full"),
}


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    settings = Settings(steps=1)
    found: dict[str, Measured] = {}
    for ranks, jobs in ((2, CASES), (4, FOUR)):
        found |= run(all_measured, (jobs, settings), ranks=ranks, timeout_s=TIMEOUT_S)[0]
    return found


@pytest.mark.parametrize("name", [*CASES, *FOUR])
def test_the_estimate_is_what_ranks_hold(name: str, measured: dict[str, Measured]) -> None:
    found = measured[name]
    assert isinstance(found, Measured), found
    assert abs(found.error) <= 0.02, f"{found.error:+.2%}\n{found.predicted}\n{found.worst}"
    assert found.within
    assert found.step_s > 0
