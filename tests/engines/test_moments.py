"""What a run needs beside its steps: loading, evaluation with its logits kept, a gathered state dict."""

from __future__ import annotations

import json
from typing import Any

import pytest

import ullage
from ullage.engines.moments import Moment, moments
from ullage.job.read import read_job
from ullage.report.json import estimate as as_json
from ullage.units import GIB

PARAMETERS = 8_030_261_248  # of Llama 3.1 8B


def answered(**keys: Any) -> ullage.Estimate:
    plain: dict[str, Any] = {
        "schema": 1,
        "model": "llama-3.1-8b",
        "cluster": "8xA100-SXM-80GB",
        "data": {"seq_len": 4096, "micro_batch": 2},
        "engine": {"name": "fsdp2"},
        "recompute": "full",
    }
    return ullage.estimate(read_job({**plain, **keys}))


def found(**keys: Any) -> dict[str, Moment]:
    return {one.name: one for one in moments(answered(**keys))}


def test_fsdp_loads_one_whole_copy_and_saves_three() -> None:
    """One rank reads the fp32 weights on the host; the gathered state dict has them and two moments. On the device one parameter is whole
    beside the shards, the largest: 128256 x 4096 in fp32."""
    one = found()
    assert one["loading"].host_bytes == PARAMETERS * 4
    assert one["saving"].host_bytes == pytest.approx(3 * PARAMETERS * 4, rel=1e-3)
    shards = PARAMETERS * 4 / 8
    assert one["loading"].allocated_bytes - 128256 * 4096 * 4 == pytest.approx(shards, rel=0.03)


def test_fsdp1_has_a_unit_whole_where_fsdp2_has_a_parameter() -> None:
    flat = found(engine={"name": "fsdp1"})
    assert flat["loading"].allocated_bytes > found()["loading"].allocated_bytes
    assert flat["saving"].allocated_bytes > found()["saving"].allocated_bytes


def test_every_rank_of_ddp_reads_the_weights_for_itself() -> None:
    one = found(model="llama-3.2-1b", engine={"name": "ddp"})
    assert one["loading"].host_bytes == 8 * 1_235_814_400 * 4


def test_kept_logits_are_those_of_every_rank() -> None:
    """2 sequences x 4096 x 128256 words from each of 8 ranks; in fp32, as accelerate hands them out under autocast, or in bf16."""
    words = 8 * 2 * 4096 * 128256
    assert found(engine={"name": "ddp"}, model="llama-3.2-1b")["evaluation"].kept_bytes == words * 4
    pure = found(precision="bf16")["evaluation"]
    assert pure.kept_bytes == words * 2
    assert pure.most_batches is not None
    answer = answered(precision="bf16")
    static, capacity = answer.ranks[0].static_bytes, answer.capacity_bytes
    assert (
        static + 2 * pure.most_batches * pure.kept_bytes < capacity
    )  # joined in a new tensor (tests/trace/test_evaluation.py)
    assert static + 2 * (pure.most_batches + 1) * pure.kept_bytes > capacity - 4 * GIB


def test_a_forward_keeps_less_than_a_step() -> None:
    answer = ullage.estimate(
        read_job({"schema": 1, "model": "llama-3.2-1b", "cluster": "1xA100-SXM-80GB", "engine": {"name": "single"}})
    )
    evaluation = next(one for one in moments(answer) if one.name == "evaluation")
    assert answer.ranks[0].static_bytes < evaluation.allocated_bytes < answer.peak.allocated_bytes


def test_megatron_copies_what_each_rank_has() -> None:
    layout = {"tp": 8, "sp": True}
    one = found(engine={"name": "megatron"}, stack="megatron", layout=layout)
    assert one["loading"].host_bytes == 0
    assert one["evaluation"].most_batches is None
    assert one["saving"].host_bytes == pytest.approx(PARAMETERS * (2 + 12), rel=0.02)


def test_a_host_that_is_too_small_is_seen() -> None:
    cluster = {"device": "A100-SXM-80GB", "gpus_per_node": 8, "nodes": 1, "host_memory": "64GB"}
    one = found(cluster=cluster)
    assert one["loading"].verdict == "fits"
    assert one["saving"].verdict == "oom"


def test_it_is_in_the_answer() -> None:
    answer = ullage.estimate(read_job({"schema": 1, "model": "llama-3.2-1b", "cluster": "8xA100-SXM-80GB"}))
    told = json.loads(json.dumps(as_json(answer)))["moments"]
    assert [one["name"] for one in told] == ["loading", "evaluation", "saving"]
    assert set(told[0]) == {
        "name", "rank", "allocated_bytes", "host_bytes", "verdict", "what", "kept_bytes", "most_batches",
    }  # fmt: skip


def test_evaluation_keeps_the_logits_of_a_head_of_whole_sequences() -> None:
    """Two numbers a sequence in fp32, of 8 ranks, each batch's rounded up to 512 B; a head of words has 30522 for each token."""
    keys: dict[str, Any] = {"engine": {"name": "ddp"}, "data": {"seq_len": 512, "micro_batch": 32}}
    classes = {"base": "bert-base-uncased", "architectures": ["BertForSequenceClassification"]}
    assert found(model=classes, **keys)["evaluation"].kept_bytes == 8 * 512
    assert found(model="bert-base-uncased", **keys)["evaluation"].kept_bytes == 8 * 32 * 512 * 30522 * 4


def test_loading_has_the_shards_of_an_offload_beside_the_whole() -> None:
    """One rank reads all; FSDP2's CPU offload pins each shard, a block that is a power of two as large; ZeRO-3's are one for all, whether
    they stay on the cards or not."""
    offload = {"optimizer": "cpu", "params": "cpu"}
    for engine in ({"name": "fsdp2"}, {"name": "deepspeed", "zero_stage": 3}):
        kept, gone = (found(engine=engine, offload=where)["loading"].host_bytes for where in ({}, offload))
        shards = gone - kept
        assert kept == pytest.approx(PARAMETERS * (4 if engine["name"] == "fsdp2" else 2), rel=0.02)
        assert kept <= shards < 2 * kept
