"""Bounds of time and of memory against the exact account, on random strategies of many kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.following import followed, following

from ullage.engines.estimate import rank_peak
from ullage.engines.registry import ranks_of
from ullage.job.job import Loss
from ullage.memory.chunk import CHECKPOINT, PLAIN
from ullage.model.graph import ROUTED
from ullage.planner.bounds import evenly_bound_s
from ullage.planner.costs import _kept_by
from ullage.planner.cuts import layers_again
from ullage.planner.shapes import ShapeCosts
from ullage.planner.space import FULL, NONE
from ullage.planner.stages import flights
from ullage.planner.states import each_element
from ullage.planner.strategies import Cut
from ullage.timing.blocks import block_time

H100, A100 = "H100-SXM-80GB", "A100-SXM-80GB"
HYBRID = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_hidden_layers": 12,
    "hybrid_override_pattern": "MEMEM*E-MEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
EIGHT_BIT = {"params": "bf16", "compute": "fp8", "grads": "bf16", "master": "fp32", "fp8_params": True}
SPACES = {
    "hybrid": {"model": HYBRID, "cluster": f"2x8x{H100}", "data": {"seq_len": 4096, "global_batch": 64}},
    "eight-bit": {
        "model": "llama-3.1-8b",
        "cluster": "2x8xB200-SXM-180GB",
        "data": {"seq_len": 4096, "global_batch": 64},
        "precision": EIGHT_BIT,
    },
    "llama": {"model": "llama-3.1-8b", "cluster": f"2x8x{H100}", "data": {"seq_len": 4096, "global_batch": 64}},
    "gpt2": {"model": "gpt2", "cluster": f"8x{A100}", "data": {"seq_len": 1024, "global_batch": 32}},
    "mixtral": {"model": "mixtral-8x7b", "cluster": f"4x8x{H100}", "data": {"seq_len": 4096, "global_batch": 128}},
    "qwen3": {"model": "qwen3-30b-a3b", "cluster": f"4x8x{H100}", "data": {"seq_len": 4096, "global_batch": 128}},
    "deepseek": {"model": "deepseek-v3", "cluster": f"32x8x{H100}", "data": {"seq_len": 4096, "global_batch": 512}},
}
SMALL = {"model": "llama-3.2-1b", "cluster": f"8x{A100}", "data": {"seq_len": 4096, "global_batch": 32}}
PARTLY_TRAINED = {
    "adapters": {**SPACES["llama"], "cluster": f"8x{A100}", "lora": {"rank": 16, "targets": "all-linear"}},
    "adapters of fused linears": {**SPACES["llama"], "lora": {"rank": 16, "targets": ["linear_qkv", "linear_fc1"]}},
    "adapters beside experts": {**SPACES["qwen3"], "cluster": f"8x{A100}", "lora": {"rank": 16}},
    "tied": {**SMALL, "lora": {"rank": 16, "dtype": "bf16"}},
    "packed": {**SMALL, "lora": {"rank": 16, "base": "nf4-double"}},
    "frozen front": {**SMALL, "freeze": ["model.layers.0.*", "*embed_tokens*"]},
    "dora": {**SMALL, "lora": {"rank": 16, "dropout": 0.1, "dora": True}},
    "head in full": {**SMALL, "lora": {"rank": 16, "modules_to_save": ["lm_head"]}},
    "in full": {
        **SMALL,
        "cluster": f"1x{A100}",
        "lora": {"rank": 16, "modules_to_save": ["lm_head"]},
        "model": "llama-3.1-8b",
    },
}
ALONE = {"model": "gpt2", "cluster": f"1x{A100}", "data": {"seq_len": 1024, "global_batch": 32}}
CASES = [
    *(("gpt2", engine) for engine in ("ddp", "zero1", "fsdp2", "deepspeed", "megatron")),
    *(("llama", engine) for engine in ("fsdp2", "deepspeed", "megatron")),
    *(("mixtral", engine) for engine in ("fsdp2", "deepspeed", "megatron")),
    ("qwen3", "megatron"),
    ("deepseek", "megatron"),
    ("hybrid", "megatron"),
    ("eight-bit", "megatron"),
    *(("adapters", engine) for engine in ("ddp", "fsdp2", "deepspeed")),
    ("adapters of fused linears", "megatron"),
    ("adapters beside experts", "fsdp2"),
    *(("tied", engine) for engine in ("fsdp2", "deepspeed")),
    *(("packed", engine) for engine in ("ddp", "fsdp2")),
    *(("frozen front", engine) for engine in ("ddp", "fsdp2", "deepspeed")),
    ("in full", "single"),
    *(("dora", engine) for engine in ("ddp", "fsdp2")),
    *(("head in full", engine) for engine in ("ddp", "fsdp2", "deepspeed")),
]
MANY = 8
SLACK = 1 + 1e-9


def space(name: str) -> dict:
    return ALONE if name == "alone" else (SPACES | PARTLY_TRAINED)[name]


@pytest.mark.parametrize(("name", "engine"), [*CASES, ("alone", "single")])
@pytest.mark.parametrize("exhaustive", [False, True], ids=["by memory", "whatever its memory"])
def test_no_look_is_above_the_exact_step(name: str, engine: str, exhaustive: bool) -> None:
    found = list(followed(following(space(name), engine, seed=1, exhaustive=exhaustive), MANY))
    assert found
    for one in found:
        *bounds, exact = one.bounds_s
        assert max(bounds) <= exact * SLACK, (bounds, exact, one.strategy.job, one.strategy.family.kinds[one.at])


@pytest.mark.parametrize(("name", "engine"), [*CASES, ("alone", "single")])
def test_no_rank_keeps_less_than_the_bound(name: str, engine: str) -> None:
    search = following(space(name), engine, seed=3, exhaustive=True)
    for one in followed(search, MANY):
        strategy = one.strategy
        recompute = strategy.family.kinds[one.at]
        job = replace(strategy.job, recompute=recompute)
        graph = strategy.base.graph_for(job)
        room = search._room[id(strategy.base)]
        for rank, stage in list(zip(ranks_of(job, graph), strategy.stages, strict=True))[:3]:
            peak, _ = rank_peak(job, graph, rank)
            assert room.stage_bytes(strategy.costs, stage, job, recompute) <= peak * SLACK, (job, rank.index)


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_the_rank_with_the_head_keeps_no_less_than_it_leaves_behind(name: str, engine: str) -> None:
    """Whatever the pipeline, its chunks and what is recomputed; of Megatron's large vocabularies it is most of what a rank keeps."""
    for one in followed(following(space(name), engine, seed=14, exhaustive=True), MANY):
        strategy = one.strategy
        job = replace(strategy.job, recompute=strategy.family.kinds[one.at])
        graph = strategy.base.graph_for(job)
        peak, _ = rank_peak(job, graph, ranks_of(job, graph)[-1])
        assert 0 < strategy.costs.grid.head_bytes(job.data.micro_batch) <= peak * SLACK, job


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_what_is_said_to_fit_only_with_more_recomputed_does(name: str, engine: str) -> None:
    """No look says that more layers must be recomputed than the first recomputation has that the bound of memory leaves."""
    search = following(space(name), engine, seed=4, exhaustive=False)
    for one in followed(search, MANY):
        strategy = one.strategy
        job, family = strategy.job, strategy.family
        each = each_element(job)
        cut = Cut(base=strategy.base, costs=strategy.costs, job=job, engines=(job,), each=each, family=family)
        again = layers_again(cut, strategy.stages, each, flights(job), search._room[id(strategy.base)])
        if again is not None:
            assert family.kinds.index(family.at_least(max(again))) <= search._first_that_may_fit(strategy), job


def _whole_s(costs: ShapeCosts) -> float:
    """All blocks, forward and backward, of the micro-batch itself."""
    times = [block_time(block, costs.context, costs.grid.place, PLAIN, NONE) for block in costs.grid.kinds]
    return sum(many * (times[kind].forward.total_s + times[kind].backward_s) for kind, many, _ in costs.grid.runs)


@pytest.mark.parametrize(
    ("name", "engine"), [*((name, "megatron") for name in SPACES), ("adapters", "fsdp2"), ("packed", "fsdp2")]
)
def test_a_block_costs_what_the_exact_account_says(name: str, engine: str) -> None:
    """Seconds that are put together from one sequence and two are those of the micro-batch itself; where its rows are no multiple of the
    experts, whose share is rounded down, they are no more."""
    for one in followed(following(space(name), engine, seed=5, exhaustive=True), MANY):
        costs = one.strategy.costs
        first = costs.grid.contexts[0]
        if first.size(ROUTED) % (first.size("experts") if "experts" in first.sizes else 1):
            assert costs.whole_s <= _whole_s(costs) * SLACK
            continue
        for kind, block in enumerate(costs.grid.kinds):
            plain = block_time(block, costs.context, costs.grid.place, PLAIN, NONE)
            assert costs.blocks[kind].forward_s == pytest.approx(plain.forward.total_s, rel=1e-9)
            assert costs.blocks[kind].backward_s == pytest.approx(plain.backward.total_s, rel=1e-9)
            if block.role == "layer":
                again = block_time(block, costs.context, costs.grid.place, CHECKPOINT, FULL).recompute.total_s
                assert costs.again_s(kind, FULL) == pytest.approx(again, rel=1e-9)


@pytest.mark.parametrize(("name", "engine"), CASES)
def test_what_is_known_before_lowering_is_no_more_than_a_shapes_blocks(name: str, engine: str) -> None:
    """Whatever the expert parallelism, whose grids share what no expert does."""
    search = following(space(name), engine, seed=8, exhaustive=False)
    grids = [grid for some in search._grids(search.bases[0]) for losses in some.costs() for grid in losses]
    for grid in search.rng.sample(grids, min(MANY, len(grids))):
        for job in search.rng.sample(shapes := search.space.shapes(search.bases[0], grid.job), min(3, len(shapes))):
            micro_batch = job.data.micro_batch
            costs = ShapeCosts(grid, job)
            dense, least = grid.dense_s(micro_batch), grid.least_s(micro_batch)
            assert 0 < grid.layers_s(micro_batch) <= dense * SLACK
            assert 0 < dense <= least * SLACK
            assert least <= costs.whole_s * SLACK, job
            assert 0 < grid.least_layer_s(micro_batch) <= costs.shortest_s * SLACK, job


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek"])
def test_no_pipeline_waits_less_than_its_shape_does(name: str) -> None:
    """And of some shapes the best pipeline is near."""
    search = following(space(name), "megatron", seed=13, exhaustive=False)
    (base,) = search.bases
    near = []
    for one in followed(search, MANY):
        costs = one.strategy.costs
        shape = costs.job
        (shared,) = search._shared(base, shape, costs.whole_s, costs.shortest_s)
        evenly = [
            evenly_bound_s(costs, job.layout.pp, accum := job.data.grad_accum, costs.send_s(job))
            / (shape.data.micro_batch * accum * job.layout.dp)
            for job in search.space.pipelines(base, shape)
        ]
        assert shared <= min(evenly) * SLACK
        near.append(shared / min(evenly))
    assert max(near) > 0.8


def test_bytes_left_behind_grow_as_a_replay_says() -> None:
    for one in followed(following(space("llama"), "megatron", seed=6, exhaustive=True), MANY):
        costs = one.strategy.costs
        for recompute in (NONE, FULL, *(one.recompute for one in costs.selections)):
            for kind, block in enumerate(costs.grid.kinds):
                how = recompute if block.role == "layer" else NONE
                assert costs.kept(recompute)[kind] == max(0, _kept_by(block, costs.context, how))


def test_bounds_are_near_enough_to_be_of_use() -> None:
    """Of Megatron's strategies that hold whole parameters the last bound is within a tenth of the exact time in nine of ten."""
    doc = space("llama") | {"engine": {"name": "megatron", "zero_stage": 1}}
    found = list(followed(following(doc, "megatron", seed=7, exhaustive=True), 40))
    near = [one.bounds_s[-2] / one.bounds_s[-1] for one in found]
    assert sorted(near)[len(near) // 10] > 0.9


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek"])
def test_a_rank_without_the_head_does_not_know_of_the_loss(name: str) -> None:
    """What it has no room for under one, it has none for under another."""
    seen = 0
    for one in followed(following(space(name), "megatron", seed=9, exhaustive=True), MANY):
        graph = one.strategy.base.graph
        recompute = one.strategy.family.kinds[one.at]
        losses = [Loss(kind="vocab-parallel"), Loss(kind="vocab-parallel-fused")]
        jobs = [replace(one.strategy.job, recompute=recompute, loss=loss) for loss in losses]
        for ranks in zip(*(ranks_of(job, graph) for job in jobs), strict=True):
            if not ranks[0].last:
                first, other = (rank_peak(job, graph, rank)[0] for job, rank in zip(jobs, ranks, strict=True))
                assert first == other
                seen += 1
    assert seen


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_of_ranks_with_the_same_chunks_the_first_holds_most(name: str) -> None:
    for one in followed(following(space(name), "megatron", seed=10, exhaustive=True), MANY):
        strategy, graph = one.strategy, one.strategy.base.graph
        job = replace(strategy.job, recompute=strategy.family.kinds[one.at])
        most: dict[object, int] = {}
        for rank, stage in zip(ranks_of(job, graph), strategy.stages, strict=True):
            peak, _ = rank_peak(job, graph, rank)
            assert peak <= most.setdefault(stage.chunks, peak)
