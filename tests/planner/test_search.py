"""The bounded search finds what the exhaustive one finds, and accounts for every strategy."""

from __future__ import annotations

import pytest

from ullage.engines.estimate import estimate
from ullage.frozen import replace
from ullage.planner.goals import goal
from ullage.planner.search import Search
from ullage.planner.wanted import bases, wanted
from ullage.timing.step import step_time

H100 = "H100-SXM-80GB"
GPT2 = {"model": "gpt2", "cluster": f"4x{H100}", "data": {"seq_len": 1024, "global_batch": 8, "micro_batch": 2}}
LLAMA = {
    "model": "llama-3.1-8b",
    "cluster": f"8x{H100}",
    "data": {"seq_len": 8192, "global_batch": 8, "micro_batch": 1},
}
MIXTRAL = {
    "model": "mixtral-8x7b",
    "cluster": "2x8xH200-SXM-141GB",
    "data": {"seq_len": 2048, "global_batch": 16, "micro_batch": 1},
}
SPACES = {
    "gpt2, several engines": (GPT2 | {"layout": {"cp": 1, "tp": 1}}, ("ddp", "zero1", "megatron")),
    "llama, pipelines": (
        LLAMA | {"layout": {"cp": 1, "tp": 4, "sp": True}, "engine": {"name": "megatron", "zero_stage": 1}},
        ("megatron",),
    ),
    "llama, sharded": (LLAMA | {"layout": {"pp": 1, "tp": 1}, "recompute": "full"}, ("fsdp2",)),
    "llama, adapters": (
        LLAMA
        | {"cluster": "8xA100-SXM-40GB", "layout": {"cp": 1}, "lora": {"rank": 16}, "offload": {"optimizer": "none"}},
        ("ddp", "fsdp2", "deepspeed"),
    ),
    "llama, packed": (
        GPT2
        | {
            "model": "llama-3.1-8b",
            "cluster": "4xRTX-4090-24GB",
            "layout": {"cp": 1},
            "lora": {"rank": 16, "base": "nf4"},
        },
        ("ddp", "fsdp2"),
    ),
    "mixtral, rows that one sequence pads and two fill": (
        {
            "model": {"base": "mixtral-8x7b", "num_hidden_layers": 4},
            "cluster": f"8x{H100}",
            "data": {"seq_len": 32, "global_batch": 64},
            "layout": {"cp": 1, "tp": 1, "pp": 1},
            "precision": {"params": "bf16", "compute": "fp8", "grads": "fp32", "master": "fp32", "reduce": "fp32"},
            "engine": {
                "name": "megatron",
                "options": {
                    "fp8": "hybrid",
                    "fp8_recipe": "tensorwise",
                    "moe_expert_capacity_factor": 1.0,
                    "moe_pad_expert_input_to_capacity": True,
                },
            },
        },
        ("megatron",),
    ),
    "llama, activations on the host": (
        {
            "model": {"base": "llama-3.1-8b", "num_hidden_layers": 8},
            "cluster": "8xA100-SXM-40GB",
            "data": {"seq_len": 8192, "global_batch": 16},
            "layout": {"cp": 1, "tp": 1, "pp": 1},
            "offload": {"activations": "cpu"},
            "engine": {"name": "megatron", "options": {"cpu_offloading_num_layers": 6}},
        },
        ("megatron",),
    ),
    "mixtral": (
        MIXTRAL | {"layout": {"cp": 1, "tp": 2, "sp": True, "etp": 1, "pp": 4}, "recompute": "full"},
        ("megatron",),
    ),
}


def searched(doc: dict, engines: tuple[str, ...], *, exhaustive: bool, tight: bool = False) -> Search:
    """With what it found as ``found``."""
    want = replace(wanted({"schema": 1, **doc}, (), engines), tight=tight)
    found, refused = bases(want)
    assert not refused
    search = Search(want=want, bases=found, goal=lambda _, seconds: (seconds,), exhaustive=exhaustive)
    search.found = search.run()
    return search


@pytest.mark.parametrize("name", list(SPACES))
def test_bounded_and_exhaustive_agree(name: str) -> None:
    doc, engines = SPACES[name]
    bounded, exhaustive = (searched(doc, engines, exhaustive=all_of_them) for all_of_them in (False, True))
    assert [one.value for one in bounded.found] == [one.value for one in exhaustive.found]
    assert bounded.found[0].estimate.verdict == "fits"
    assert bounded.counts.evaluated > 0
    assert exhaustive.counts.pruned == 0
    assert exhaustive.counts.space == exhaustive.counts.evaluated + exhaustive.counts.infeasible
    assert bounded.counts.evaluated + bounded.counts.infeasible <= bounded.counts.space


@pytest.mark.parametrize("name", ["llama, adapters", "llama, packed"])
def test_what_may_not_fit_is_found_where_it_is_asked_for(name: str) -> None:
    doc, engines = SPACES[name]
    bounded, exhaustive = (searched(doc, engines, exhaustive=all_of_them, tight=True) for all_of_them in (False, True))
    assert [one.value for one in bounded.found] == [one.value for one in exhaustive.found]
    assert bounded.found[0].estimate.verdict == "tight"
    assert bounded.found[0].value < searched(doc, engines, exhaustive=False).found[0].value


@pytest.mark.parametrize("name", ["simplest", "cheapest", "fewest-gpus"])
def test_every_goal_is_bounded_as_it_is_exactly(name: str) -> None:
    """DeepSpeed beside DDP: a bound must not count a stage that is still open."""
    doc = GPT2 | {"layout": {"cp": 1, "tp": 1}, "offload": {"optimizer": "none"}}
    values = []
    for exhaustive in (False, True):
        want = wanted({"schema": 1, **doc}, (), ("deepspeed", "ddp"))
        found, _ = bases(want)
        (best,) = Search(want=want, bases=found, goal=goal(name), exhaustive=exhaustive).run()
        values.append(best.value)
    assert values[0] == values[1]


def test_an_engine_that_divides_no_optimizer_leaves_none_on_the_host() -> None:
    doc = GPT2 | {"layout": {"cp": 1, "tp": 1}, "offload": {"optimizer": "cpu"}}
    (best,) = searched(doc, ("ddp", "deepspeed"), exhaustive=False).found
    assert best.job.engine.name == "deepspeed"


def test_a_plan_beside_adapters_is_what_its_job_takes_by_itself() -> None:
    """Recomputation, which is free in a search, asks for gradients of the embedding's output (transformers' enable_input_require_grads)."""
    doc = LLAMA | {"layout": {"dp": 8}, "lora": {"rank": 16}, "recompute": "full"}
    (best,) = searched(doc, ("fsdp2",), exhaustive=False).found
    assert best.job.recompute.kind == "full"
    assert best.time == step_time(best.job)
    assert best.estimate.peak == estimate(best.job).peak


@pytest.mark.parametrize(
    ("lora", "engine", "said"),
    [
        ({"dora": True}, "fsdp1", "lora.dora"),
        ({}, "zero1", "lora = set"),
        ({"base": "nf4"}, "deepspeed", "lora.base"),
    ],
)
def test_adapters_that_no_plan_is_told_of_are_refused_by_name(lora: dict, engine: str, said: str) -> None:
    want = wanted({"schema": 1, **LLAMA, "lora": lora}, (), (engine,))
    found, refused = bases(want)
    assert not found
    assert said in str(refused[engine])
