"""Each technique on real ranks is one device: losses, gradient norms and final weights, from the same seed on the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.distributed.training import BUCKETS, STAGE_3, all_proved, job_of
from tests.distributed.world import run

from ullage.train.answers import Proof
from ullage.train.settings import Settings

pytestmark = pytest.mark.xdist_group("proofs")  # one worker, so that its processes are started once
STEPS = 20
TIMEOUT_S = 600.0
TP = {"tp": 2}
SP = {"tp": 2, "sp": True}
PP = {"pp": 2, "pp_split": [2, 1]}
CHUNKS = {"layout": {"pp": 2, "vpp": 2, "schedule": "interleaved-1f1b"}, "model": {"num_hidden_layers": 4}}
TIED_CHUNKS = {**CHUNKS["model"], "tie_word_embeddings": True}
ZBV, DUAL = ({**CHUNKS["layout"], "schedule": name} for name in ("zbv", "dualpipev"))
FOUR = {
    "HSDP": job_of("fsdp2", 4, shard_group=2),
    "ZeRO-3": job_of("fsdp2", 4, data={"grad_accum": 1}),
    "ZeRO-3 x TP": job_of("fsdp2", 4, layout=TP, model={"model_type": "qwen3", "tie_word_embeddings": True}),
    "ZeRO-2 x TP, bf16": job_of("fsdp2", 4, layout=TP, zero_stage=2, precision="bf16-mixed", recompute="full"),
    "ZeRO-3 x TP along the sequence": job_of("fsdp2", 4, layout=SP),
    "ZeRO-3 x TP, fp16": job_of("fsdp2", 4, layout=TP, precision="fp16-mixed"),
    "ZeRO-3 x PP": job_of("fsdp2", 4, layout=PP),
    "ZeRO-3 x interleaved 1F1B, bf16": job_of("fsdp2", 4, precision="bf16-mixed", **CHUNKS),
    "TP x PP, tied": job_of("fsdp2", 4, layout={**TP, **PP}, recompute="full", model={"tie_word_embeddings": True}),
}
EIGHT = {"ZeRO-3 x TP x PP": job_of("fsdp2", 8, layout={**TP, **PP})}
TWO = {
    "DDP": job_of("ddp", 2),
    "DDP, views": job_of("ddp", 2, options={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
    "DDP, in place": job_of("ddp", 2, options={"reduce_in_place": True}, model={"tie_word_embeddings": True}),
    "ZeRO-1, in place, casts once, fp16": job_of(
        "zero1", 2, options={"reduce_in_place": True, "cast_once": True}, precision="fp16-mixed"
    ),
    "ZeRO-1": job_of("zero1", 2),
    "ZeRO-2": job_of("fsdp2", 2, zero_stage=2),
    "ZeRO-3": job_of("fsdp2", 2),
    "ZeRO-3, each batch reduced": job_of("fsdp2", 2, options={"sync_each_batch": True}),
    "ZeRO-3, tied": job_of("fsdp2", 2, model={"tie_word_embeddings": True}),
    "full recomputation": job_of("fsdp2", 2, recompute="full"),
    "every second layer": job_of("ddp", 2, recompute={"every": 2}),
    "the first two layers": job_of("fsdp2", 2, recompute={"layers": 2}),
    "groups of layers": job_of("fsdp2", 2, recompute={"sqrt": True}),
    "MLPs alone, bf16": job_of("fsdp2", 2, recompute={"modules": ["mlp"]}, precision="bf16-mixed"),
    "by op": job_of("fsdp2", 2, recompute="selective"),
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
    "TP": job_of("fsdp2", 2, layout=TP, recompute="full"),
    "TP, bf16": job_of("fsdp2", 2, layout=TP, precision="bf16-mixed", recompute="selective"),
    "TP along the sequence": job_of("fsdp2", 2, layout=SP, recompute="full"),
    "TP along the sequence, bf16": job_of(
        "fsdp2", 2, layout=SP, precision="bf16-mixed", model={"model_type": "qwen3", "tie_word_embeddings": True}
    ),
    "GPipe": job_of("fsdp2", 2, layout={**PP, "schedule": "gpipe"}, recompute="full"),
    "1F1B, fp16": job_of("fsdp2", 2, layout=PP, precision="fp16-mixed"),
    "1F1B": job_of("fsdp2", 2, layout=PP, data={"grad_accum": 3}, recompute={"layers": 1}),
    "interleaved 1F1B": job_of("fsdp2", 2, **CHUNKS),
    "zero bubble": job_of("fsdp2", 2, layout={**PP, "schedule": "zb-h1"}),
    "zero bubble in a V, tied": job_of("fsdp2", 2, layout=ZBV, model=TIED_CHUNKS),
    "DualPipe in a V": job_of("fsdp2", 2, layout=DUAL, model=CHUNKS["model"], data={"grad_accum": 4}),
    "parameters and states on the host": job_of(
        "fsdp2", 2, offload={"params": "cpu", "optimizer": "cpu"}, precision="fp16-mixed"
    ),
    "adapters": job_of("ddp", 2, lora={"rank": 8}, precision="bf16-mixed"),
    "adapters of a base in bf16": job_of(
        "ddp", 2, lora={"rank": 8, "targets": "all-linear"}, precision="bf16", recompute="full"
    ),
    "adapters on shards": job_of("fsdp2", 2, lora={"rank": 8}, precision="bf16-mixed"),
    "DoRA and a head, on shards": job_of(
        "fsdp2", 2, lora={"rank": 8, "dora": True, "modules_to_save": ["lm_head"]}, precision="bf16-mixed"
    ),
    "adapters on shards of a base in bf16": job_of(
        "fsdp2", 2, lora={"rank": 8, "targets": "all-linear", "dtype": "bf16"}, precision="bf16", recompute="full"
    ),
    "DeepSpeed": job_of("deepspeed", 2, zero_stage=0),
    "DeepSpeed ZeRO-1": job_of("deepspeed", 2, zero_stage=1, options=BUCKETS),
    "DeepSpeed ZeRO-2, overlapping": job_of(
        "deepspeed",
        2,
        zero_stage=2,
        options={**BUCKETS, "overlap_comm": True},
        optimizer={"name": "adamw", "impl": "for-loop"},
    ),
    "DeepSpeed ZeRO-3, tied": job_of(
        "deepspeed", 2, zero_stage=3, options=STAGE_3, model={"tie_word_embeddings": True}, recompute={"sqrt": True}
    ),
    "DeepSpeed ZeRO-3, no clipping, SGD": job_of(
        "deepspeed",
        2,
        zero_stage=3,
        options={**STAGE_3, "momentum": 0.9},
        grad_clip=False,
        optimizer={"name": "sgd", "impl": "foreach"},
    ),
    "DeepSpeed ZeRO-1, bf16, summed in fp32": job_of(
        "deepspeed", 2, zero_stage=1, options={**BUCKETS, "grad_accum_dtype": "fp32"}, precision="bf16-mixed"
    ),
    "DeepSpeed ZeRO-2, fp16, states on the host": job_of(
        "deepspeed", 2, zero_stage=2, options=BUCKETS, precision="fp16-mixed", offload={"optimizer": "cpu"}
    ),
    "DeepSpeed ZeRO-2, adapters": job_of(
        "deepspeed",
        2,
        zero_stage=2,
        options=BUCKETS,
        lora={"rank": 8, "targets": "all-linear"},
        precision="bf16-mixed",
        recompute="full",
    ),
    "DeepSpeed ZeRO-3, adapters": job_of(
        "deepspeed", 2, zero_stage=3, options=STAGE_3, lora={"rank": 8}, precision="bf16-mixed"
    ),
    "DeepSpeed ZeRO-3, bf16": job_of("deepspeed", 2, zero_stage=3, options=STAGE_3, precision="bf16-mixed"),
    "DeepSpeed ZeRO-3, fp16": job_of("deepspeed", 2, zero_stage=3, options=STAGE_3, precision="fp16-mixed"),
}
WORLDS = {2: TWO, 4: FOUR, 8: EIGHT}


@pytest.fixture(scope="module")
def proofs() -> dict[int, dict[str, Proof]]:
    """Of all jobs of a world, by its ranks: its processes are started once."""
    settings = Settings(steps=STEPS, lr=1e-3)
    return {
        ranks: run(all_proved, (jobs, settings), ranks=ranks, timeout_s=TIMEOUT_S)[0] for ranks, jobs in WORLDS.items()
    }


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, jobs in WORLDS.items() for name in jobs])
def test_ranks_are_one_device(ranks: int, name: str, proofs: dict[int, dict[str, Proof]]) -> None:
    found = proofs[ranks][name]
    assert isinstance(found, Proof), found
    assert len(found.rows) == STEPS
    assert found.equal, f"{replace(found, rows=())}\n{found.rows[-1]}"
    assert found.rows[0].loss != found.rows[-1].loss
