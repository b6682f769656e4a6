"""What a job leaves open, and the bracket that follows."""

from __future__ import annotations

import math
import random
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ullage
from ullage.engines import interval
from ullage.engines.estimate import Estimate
from ullage.engines.interval import (
    ALL_MODELLED,
    ANY,
    KINDS,
    LEAST_ABOVE,
    TEXTS,
    Bracket,
    Spread,
    bracket,
    held_bytes,
    kind,
    spread,
)
from ullage.engines.lengths import KEPT, MICRO_BATCHES
from ullage.engines.registry import account, ranks_of
from ullage.job.adapted import graph_of
from ullage.job.read import read_job
from ullage.report.words import verdict

DENSE: dict[str, Any] = {
    "model": {"base": "llama-3.1-8b", "num_hidden_layers": 2}, "cluster": "8xH100-SXM-80GB", "data": {"seq_len": 1024},
}  # fmt: skip
EXPERTS = {"base": "mixtral-8x7b", "num_hidden_layers": 2}
MEGATRON = {"engine": {"name": "megatron", "zero_stage": 1}, "stack": "megatron"}


def _options(**options: Any) -> dict[str, Any]:
    return {**MEGATRON, "engine": {"name": "megatron", "zero_stage": 1, "options": options}}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("model", {"engine": {"name": "fsdp2"}}),
        ("megatron", MEGATRON),
        ("option", _options(fp8_recipe="tensorwise")),
        ("compile", {"engine": {"name": "fsdp2"}, "stack": "torchtitan", "compile": True}),
        ("routing", {**MEGATRON, "model": EXPERTS}),
        ("experts", {"engine": {"name": "fsdp2"}, "model": EXPERTS}),
        ("routing", {**_options(fp8_recipe="tensorwise"), "model": EXPERTS}),
        ("megatron", {**_options(moe_router_force_load_balancing=True), "model": EXPERTS}),
        ("texts", {"engine": {"name": "ddp"}, "stack": "transformers"}),
        ("texts", {**MEGATRON, "data": {"seq_len": 1024, "seq_len_mean": 512}}),
        ("fork", {"engine": {"name": "deepspeed", "zero_stage": 1}, "stack": "megatron"}),
    ],
)
def test_what_is_most_uncertain_in_a_job(name: str, changed: dict[str, Any]) -> None:
    job = read_job({**DENSE, **changed})
    graph = graph_of(job)
    assert kind(job, account(job, graph, ranks_of(job, graph)[0])) == name


def test_spreads_are_those_of_measured_runs() -> None:
    """Kinds were measured, of at least two sources; none lies on one side of its estimates. Of too few measurements all kinds' is taken."""
    text = (Path(interval.__file__).parent / "data" / "residuals.toml").read_text(encoding="utf-8")
    written = tomllib.loads(text)["kinds"]
    assert ANY in written
    assert len(written) >= len(KINDS)
    assert all(spread(name) == spread(ANY) for name in KINDS.keys() - written.keys())
    for name, entry in written.items():
        assert len(entry["sources"]) > 1
        found = spread(name)
        assert found.low == entry["low"] < 1
        assert found.high == entry["high"] >= 1 + LEAST_ABOVE
    assert spread(TEXTS).high == spread(ALL_MODELLED).high
    assert spread("a kind without measurements") == spread(ANY)


def _zero3(**options: Any) -> Estimate:
    """A model of 52 billion on 64 V100: bigscience experiments/gpt2.md, run by DeepSpeed's example of Megatron-LM 1.1.5."""
    model = {
        "model_type": "gpt", "hidden_size": 8192, "num_hidden_layers": 64, "num_attention_heads": 32, "intermediate_size": 32768,
        "vocab_size": 50304, "max_position_embeddings": 1024, "position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True,
        "qkv_bias": True, "tie_word_embeddings": True,
    }  # fmt: skip
    job = {
        "schema": 1,
        "model": model,
        "cluster": "16x4xV100-SXM-32GB",
        "data": {"seq_len": 1024, "micro_batch": 20},
        "engine": {"name": "deepspeed", "zero_stage": 3, "options": options},
        "stack": "megatron",
        "precision": "fp16-mixed",
        "recompute": "full",
        "attention": "eager",
    }
    return ullage.estimate(read_job(job))


def test_checkpoints_of_the_zero3_example_may_be_on_the_host() -> None:
    """Its scripts move them there; a job that names its other flags and says nothing of these is no certain failure. It ran."""
    told = _zero3(split_transformers=True, checkpoint_num_layers=2)
    assert told.verdict == "tight"
    stream = 20 * 1024 * 8192 * 2
    kept = next(line.bytes for line in told.ledger if line.what == "residual stream between blocks")
    assert kept == 64 * stream
    assert told.peak.device_bytes - told.peak.low_bytes > kept
    for said in ({}, {"split_transformers": True, "cpu_checkpointing": False, "partition_activations": False}):
        assert _zero3(checkpoint_num_layers=1, **said).verdict == "oom"


def test_half_layers_are_counted() -> None:
    """Two of them are a layer: as many checkpoints as without the split."""
    assert (
        _zero3(split_transformers=True, checkpoint_num_layers=2).peak.allocated_bytes
        == _zero3(checkpoint_num_layers=1).peak.allocated_bytes
    )


def test_an_end_is_a_share_of_its_own_end_of_the_bracket() -> None:
    """Overheads outside the allocator are no share of anything, and no low end is below what is sure."""
    found = Bracket(
        least_bytes=800,
        most_bytes=1000,
        needed_bytes=1000,
        below_bytes=10,
        above_bytes=50,
        sure_bytes=0,
        capacity_bytes=5000,
    )
    told = found.widened(Spread(low=0.5, high=1.2))
    assert (told.low_bytes, told.high_bytes) == (410, 1250)
    assert found.beyond(410) == pytest.approx((math.log(0.5), math.log(0.36)))
    assert found.beyond(1250) == pytest.approx((math.log(1.55), math.log(1.2)))
    assert found.beyond(10) == (-math.inf, -math.inf)
    assert replace(found, sure_bytes=600).widened(Spread(low=0.5, high=1.2)).low_bytes == 610


def test_a_cache_takes_a_card_to_its_capacity_and_a_need_above_it() -> None:
    found = Bracket(
        least_bytes=1000,
        most_bytes=3000,
        needed_bytes=1000,
        below_bytes=0,
        above_bytes=0,
        sure_bytes=0,
        capacity_bytes=2000,
    )
    assert found.widened(Spread(low=1.0, high=1.2)).high_bytes == 1999
    assert found.widened(Spread(low=1.0, high=2.5)).high_bytes == 2500
    assert replace(found, capacity_bytes=5000).widened(Spread(low=1.0, high=1.2)).high_bytes == 3600


def test_a_cache_holds_what_each_longest_so_far_brought() -> None:
    """The mean over random orders of 32 lengths, each one drawn from 0..1, of the sum of those longer than all before them."""
    draw = random.Random(0)
    rounds = 20_000
    total = 0.0
    for _ in range(rounds):
        longest = 0.0
        for length in (draw.random() for _ in range(MICRO_BATCHES)):
            if length > longest:
                longest = length
                total += length
    assert total / rounds == pytest.approx(KEPT, rel=0.01)


LORA: dict[str, Any] = {
    "model": "llama-3.2-1b", "cluster": "1xA100-SXM-80GB", "engine": {"name": "single"}, "stack": "transformers", "recompute": "full",
    "precision": "bf16", "lora": {"targets": ["q_proj", "v_proj"], "base": "bf16"},
}  # fmt: skip


def _cached(**changed: Any) -> tuple[int, int, int]:
    """(held, reserved, most) of a job of texts."""
    job = read_job({**LORA, **changed})
    graph = graph_of(job)
    found = account(job, graph, ranks_of(job, graph)[0])
    reserved = ullage.estimate(job).peak.reserved_bytes
    return held_bytes(found), reserved, bracket(job, found, reserved, ()).most_bytes


def test_what_a_cache_may_hold_is_what_the_allocator_does_with_varying_lengths() -> None:
    """The simulation of 32 micro-batches, all lengths equally likely, against the sum of those that are longer than all before."""
    held, reserved, most = _cached(data={"seq_len": 2048})
    _, played, _ = _cached(data={"seq_len": 2048, "seq_len_mean": 1024})
    assert most - held == pytest.approx(KEPT * (reserved - held), rel=1e-6)
    assert played - held == pytest.approx(most - held, rel=0.25)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"seq_len": 2048, "seq_len_mean": 1024}},
        {"data": {"seq_len": 2048}, "engine": {"name": "single", "options": {"expandable_segments": True}}},
    ],
)
def test_a_cache_holds_no_more_where_lengths_are_played_or_segments_expand(changed: dict[str, Any]) -> None:
    _, reserved, most = _cached(**changed)
    assert most == reserved


def _fine_tuned(cluster: str) -> Estimate:
    return ullage.estimate(
        read_job({"model": "llama-3.2-1b", "cluster": cluster, "engine": {"name": "single"}, "data": {"seq_len": 2048}})
    )


def test_texts_of_varying_lengths_fill_a_card_and_do_not_overflow_it() -> None:
    """What is cached is given back before anything fails; what any job may need is not."""
    fits = _fine_tuned("1xA100-SXM-40GB")
    assert (fits.peak.high_bytes, fits.verdict) == (fits.capacity_bytes - 1, "fits")
    assert fits.cache_fills
    assert verdict(fits).startswith("It fits; what lengths that vary leave")
    small = _fine_tuned("1xRTX-4090-24GB")
    assert not small.cache_fills
    assert small.peak.high_bytes > small.capacity_bytes
    assert small.verdict != "fits"
    assert small.peak.high_bytes < small.peak.reserved_bytes * spread(TEXTS).high + 2**30  # beside it, the context
    large = _fine_tuned("1xH200-SXM-141GB")
    assert large.capacity_bytes > large.peak.high_bytes > KEPT * (large.peak.reserved_bytes - 16 * large.parameters)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "single"])
def test_no_run_needs_less_than_its_states(engine: str) -> None:
    """16 bytes of fp32 weights, gradients and Adam's moments for each parameter (Rajbhandari et al. 2020, section 3.1), 107.8 GB of 80:
    tatsu-lab/stanford_alpaca#221, which ran out."""
    told = _estimate_7b(engine)
    assert told.verdict == "oom"
    assert 0.95 * 16 * told.parameters < told.peak.low_bytes < told.peak.allocated_bytes


def _estimate_7b(engine: str) -> Estimate:
    keys = {"model": "llama-2-7b", "cluster": "1xA100-SXM-80GB", "engine": {"name": engine}, "data": {"seq_len": 512}}
    return ullage.estimate(read_job(keys))
