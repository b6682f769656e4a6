"""Schedules that halve backwards, in the account: what waits for the weights' gradients, and what a rank holds of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import ullage
from ullage.engines.estimate import Estimate
from ullage.engines.registry import account, ranks_of
from ullage.errors import Unsupported
from ullage.job.adapted import graph_of
from ullage.job.job import Engine
from ullage.job.read import read_job
from ullage.memory.program import events, net
from ullage.timing.step import step_time

MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
SCHEDULES = ("zb-h1", "zb-h2", "zbv", "v-half", "v-min", "dualpipe", "dualpipev")
ENGINES = (
    ("megatron", "megatron", "bf16-mixed"),
    ("fsdp2", "transformers", "fp32"),
    ("fsdp2", "torchtitan", "bf16-mixed"),
)


def job(schedule: str, engine: str = "megatron", stack: str = "megatron", **keys: Any) -> ullage.Job:
    plain: dict[str, Any] = {
        "schema": 1,
        "model": MODEL,
        "cluster": "4xA100-SXM-40GB",
        "data": {"seq_len": 64, "micro_batch": 2, "grad_accum": 8},
        "layout": {"pp": 4, "schedule": schedule},
        "engine": {"name": engine},
        "stack": stack,
        "precision": "bf16-mixed",
    }
    return read_job({**plain, **keys})


@pytest.mark.parametrize(("engine", "stack", "precision"), ENGINES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_leaves_nothing_and_its_fold_is_its_replay(
    schedule: str, engine: str, stack: str, precision: str
) -> None:
    one = job(schedule, engine, stack, precision=precision)
    graph = graph_of(one)
    for rank in ranks_of(one, graph):
        found = account(one, graph, rank)
        assert not {item.what for item, count in net(found.step).items() if item.bytes and count}
        live = most = 0
        for event in events(found.program):
            live += event.item.bytes if event.alive else -event.item.bytes
            most = max(most, live)
        assert most == found.program.peak_bytes


def _allocated(schedule: str, **keys: Any) -> list[int]:
    return [rank.allocated_bytes for rank in _estimate(schedule, **keys).ranks]


def _estimate(schedule: str, **keys: Any) -> Estimate:
    return ullage.estimate(job(schedule, **keys))


def test_what_waits_weighs_as_much_as_what_is_in_flight() -> None:
    """arXiv 2401.10241, section 2.1: where no attention scores are kept, what the weights' half needs is nearly what a forward saved.
    So ZB-H1 holds on each rank what 1F1B holds on its first, and ZB-H2 nearly twice that."""
    data = {"data": {"seq_len": 2048, "micro_batch": 4, "grad_accum": 16}}
    plain, h1, h2 = (_allocated(name, **data) for name in ("1f1b", "zb-h1", "zb-h2"))
    assert h1[0] == pytest.approx(plain[0], rel=0.02)
    assert plain[2] < 0.8 * plain[0] < 0.9 * h1[2] < plain[0]
    assert all(more > 1.5 * less for more, less in zip(h2[:3], h1[:3], strict=True))


def test_what_no_weight_is_reached_from_goes_with_the_first_half() -> None:
    """torch keeps the graph up to its last weight: the last rank has no log-softmax of those whose second half waits."""
    shape = {"data": {"seq_len": 64, "micro_batch": 2, "grad_accum": 8}, "precision": "fp32"}
    found = ullage.estimate(job("zb-h1", "fsdp2", "transformers", **shape))
    assert found.peak.rank == 3
    kept = [line.bytes for line in found.ledger if line.what == "log-softmax of the logits"]
    assert kept == [2 * 64 * 1000 * 4]  # of the micro-batch whose first half runs, though three wait for their second


def test_building_blocks_hold_less_for_their_bubble() -> None:
    data = {"data": {"seq_len": 2048, "micro_batch": 4, "grad_accum": 16}}
    whole, half, least = (max(_allocated(name, **data)[1:]) for name in ("zbv", "v-half", "v-min"))
    assert least < half < whole
    times = [step_time(job(name, **data)).step_s for name in ("zbv", "v-half", "v-min")]
    assert times[0] == min(times)


def test_a_v_has_both_ends_on_the_first_rank() -> None:
    layers = [(rank.first, rank.last) for rank in ranks_of(job("zbv"), graph_of(job("zbv")))]
    assert layers == [(True, True), (False, False), (False, False), (False, False)]


def test_dualpipe_holds_the_model_twice() -> None:
    one, plain = job("dualpipe"), job("1f1b")
    graph = graph_of(one)
    both, once = ranks_of(one, graph), ranks_of(plain, graph)
    assert sum(rank.numel() for rank in both) == 2 * sum(rank.numel() for rank in once)
    assert [rank.numel() for rank in both] == [a.numel() + b.numel() for a, b in zip(once, once[::-1], strict=True)]


def test_a_split_by_ranks_follows_the_v() -> None:
    one = job("zbv", layout={"pp": 4, "schedule": "zbv", "pp_split": [3, 2, 2, 1]})
    assert [[chunk.layers for chunk in rank.chunks] for rank in ranks_of(one, graph_of(one))] == [
        [1, 2], [1, 1], [1, 1], [0, 1],
    ]  # fmt: skip


def test_what_is_not_modelled_is_said() -> None:
    with pytest.raises(Unsupported, match="recompute"):
        _estimate("zbv", engine="fsdp2", stack="transformers", recompute="full")
    with pytest.raises(Unsupported, match=r"layout\.schedule"):
        ullage.estimate(replace(job("zb-h1"), engine=Engine(name="deepspeed", zero_stage=1)))
