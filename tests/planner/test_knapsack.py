"""The sets of modules that a search chooses from, against every set, replayed and timed."""

from __future__ import annotations

from functools import lru_cache

import pytest

from ullage.job.job import Recompute
from ullage.planner.balance import _again
from ullage.planner.costs import GridCosts
from ullage.planner.knapsack import groups
from ullage.planner.shapes import ShapeCosts
from ullage.planner.space import Family, Space, modules_of, of_modules, subsets
from ullage.planner.wanted import bases, wanted

MODELS = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt2")


@lru_cache
def shape(model: str, micro_batch: int = 3, impl: str = "transformer_engine") -> ShapeCosts:
    doc = {
        "schema": 1,
        "engine": {"name": "megatron", "options": {"transformer_impl": impl}},
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


@pytest.mark.parametrize("model", MODELS)
def test_groups_add_up(model: str) -> None:
    """What a set of the front takes and leaves is what its own replay says, though only parts of it were replayed."""
    costs = shape(model)
    layers = costs.grid.groups.layers
    plain = costs.kept(Recompute())
    for one in costs.selections:
        for at, kind in enumerate(layers):
            assert one.left_bytes[at] == costs.kept(one.recompute)[kind] - plain[kind]
            assert one.again_s[at] == pytest.approx(costs.again_s(kind, one.recompute), rel=1e-9)
            assert costs.kept(one.recompute)[kind] >= costs.smallest[kind]


@pytest.mark.parametrize("model", MODELS)
def test_no_set_is_below_the_lines_of_a_balance(model: str) -> None:
    costs = shape(model)
    layers = costs.grid.groups.layers
    plain = costs.kept(Recompute())
    family = Family(kinds=tuple(of_modules(names) for names in every_set(costs) if names))
    lines = _again(costs, family) if family.modular else []
    assert lines or not family.modular
    for names, (seconds, kept) in every_set(costs).items():
        for line in lines:
            saved_s = dict(
                zip([kind for kind, _, role in costs.grid.runs if role == "layer"], line.saved_s, strict=True)
            )
            for at, kind in enumerate(layers):
                below = line.s_per_byte * plain[kind] - saved_s[kind]
                assert seconds[at] + line.s_per_byte * kept[at] >= below - 1e-9, names


def test_modules_of_a_group_are_weighed_together() -> None:
    """A norm's output is gone only where the matmuls behind it run again: mlp and layernorm free more together than apart; under
    Transformer Engine the norm is part of the mlp."""
    costs = shape("llama-3.1-8b", impl="local")
    found = groups(costs.grid, modules_of(costs.job, costs.grid.graph))
    assert set(found) == {frozenset({"core_attn"}), frozenset({"layernorm", "mlp"})}
    fused = shape("llama-3.1-8b")
    assert set(groups(fused.grid, modules_of(fused.job, fused.grid.graph))) == {
        frozenset({"core_attn"}),
        frozenset({"mlp"}),
    }


def test_the_layer_of_experts_is_not_chosen_beside_its_parts() -> None:
    costs = shape("deepseek-v3")
    chosen = [set(one.modules) for one in costs.selections]
    assert any("moe" in some for some in chosen)
    assert any({"moe_act", "shared_experts"} <= some for some in chosen)
    assert not [some for some in chosen if "moe" in some and some & {"moe_act", "shared_experts"}]


def test_seconds_grow_along_the_front() -> None:
    costs = shape("deepseek-v3")
    layers = [kind for kind, block in enumerate(costs.grid.kinds) if block.role == "layer"]
    seconds = [sum(costs.again_s(kind, one.recompute) for kind in layers) for one in costs.selections]
    assert seconds == sorted(seconds)
