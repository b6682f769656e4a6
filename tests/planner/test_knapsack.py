"""The sets of modules that a search chooses from, against every set, replayed and timed."""

from __future__ import annotations

from functools import lru_cache

import pytest

from ullage.job.job import Recompute
from ullage.planner.costs import GridCosts, ShapeCosts
from ullage.planner.knapsack import groups
from ullage.planner.space import Space, modules_of, of_modules, subsets
from ullage.planner.wanted import bases, wanted

MODELS = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt2")


@lru_cache
def shape(model: str, micro_batch: int = 3) -> ShapeCosts:
    doc = {
        "schema": 1,
        "model": model,
        "cluster": "8x8xH100-SXM-80GB",
        "data": {"seq_len": 1024, "global_batch": 384},
        "layout": {"tp": 2, "sp": True, "cp": 1},
    }
    want = wanted(doc, (), ("megatron",))
    (base,), _ = bases(want)
    space = Space(want)
    grid = GridCosts(next(space.grids(base))[0], base.graph)
    (job,) = [one for one in space.shapes(base, grid.job) if one.data.micro_batch == micro_batch]
    return ShapeCosts(grid, job)


def every_set(costs: ShapeCosts) -> dict[frozenset[str], tuple[tuple[float, ...], tuple[int, ...]]]:
    """Seconds and bytes of each kind of layer."""
    layers = [kind for kind, block in enumerate(costs.grid.kinds) if block.role == "layer"]
    modules = modules_of(costs.job, costs.grid.graph)
    found = {}
    for names in subsets(modules.names, modules):
        how = of_modules(names) if names else Recompute()
        seconds = tuple(round(costs.again_s(kind, how), 12) for kind in layers)
        found[names] = seconds, tuple(costs.kept(how)[kind] for kind in layers)
    return found


def no_worse(one: tuple[tuple[float, ...], tuple[int, ...]], other: tuple[tuple[float, ...], tuple[int, ...]]) -> bool:
    return all(a <= b for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_every_set_is_matched_by_one_of_the_front(model: str) -> None:
    costs = shape(model)
    measured = every_set(costs)
    front = [frozenset(), *(frozenset(one.modules) for one in costs.selections)]
    for names, cost in measured.items():
        assert any(no_worse(measured[one], cost) for one in front), names


@pytest.mark.parametrize("model", MODELS)
def test_no_set_of_the_front_is_beaten(model: str) -> None:
    costs = shape(model)
    measured = every_set(costs)
    for one in costs.selections:
        mine = measured[frozenset(one.modules)]
        assert not [names for names, cost in measured.items() if cost != mine and no_worse(cost, mine)], one


def test_modules_of_a_group_are_weighed_together() -> None:
    """A norm's output is gone only where the matmuls behind it run again: mlp and layernorm free more together than apart."""
    costs = shape("llama-3.1-8b")
    found = groups(costs.grid, modules_of(costs.job, costs.grid.graph))
    assert set(found) == {frozenset({"core_attn"}), frozenset({"layernorm", "mlp"})}


def test_the_layer_of_experts_is_not_chosen_beside_its_parts() -> None:
    costs = shape("deepseek-v3")
    chosen = [set(one.modules) for one in costs.selections]
    assert any("moe" in some for some in chosen)
    assert any({"moe_act", "shared_experts"} <= some for some in chosen)
    assert not [some for some in chosen if "moe" in some and some & {"moe_act", "shared_experts"}]


def test_seconds_grow_along_the_front() -> None:
    costs = shape("deepseek-v3")
    layers = [kind for kind, block in enumerate(costs.grid.kinds) if block.role == "layer"]
    seconds = [sum(costs.again_s(kind, one) for kind in layers) for one in costs.selections]
    assert seconds == sorted(seconds)
