"""Which modules to recompute: an exact knapsack of the bytes that a layer leaves behind against the seconds that it takes longer.

What is freed by one module does not add to what another frees: a norm's output goes only where all that save it run again. Modules whose
steps touch a common tensor are weighed together, every set of them; groups that share none add up, so that of each group only the sets
that no other set beats are carried on to the next (the dynamic programme of a knapsack with a front in place of a capacity). With
several kinds of layer a set is beaten only where another is no worse in every kind: pipeline ranks hold different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ullage.frozen import frozen
from ullage.job.job import Recompute
from ullage.kernels import stacks
from ullage.kernels.stacks import Modules
from ullage.kernels.step import Context
from ullage.model.graph import Block
from ullage.planner.space import NONE, of_modules, subsets

if TYPE_CHECKING:
    from ullage.planner.costs import GridCosts, ShapeCosts


@frozen
class _Set:
    """Of each kind of layer, the seconds of its recomputation and the bytes that it leaves behind more than one that recomputes nothing."""

    modules: frozenset[str]
    again_s: tuple[float, ...]
    left_bytes: tuple[int, ...]

    def beats(self, other: _Set) -> bool:
        return all(a <= b for a, b in zip(self.again_s, other.again_s, strict=True)) and all(
            a <= b for a, b in zip(self.left_bytes, other.left_bytes, strict=True)
        )

    def with_(self, other: _Set) -> _Set:
        return _Set(
            modules=self.modules | other.modules,
            again_s=tuple(a + b for a, b in zip(self.again_s, other.again_s, strict=True)),
            left_bytes=tuple(a + b for a, b in zip(self.left_bytes, other.left_bytes, strict=True)),
        )


def front(costs: ShapeCosts, modules: Modules) -> tuple[Recompute, ...]:
    """The sets of modules that no other set beats, the fastest first; not the one that recomputes nothing."""
    layers = [kind for kind, block in enumerate(costs.grid.kinds) if block.role == "layer"]
    found = [_Set(modules=frozenset(), again_s=(0.0,) * len(layers), left_bytes=(0,) * len(layers))]
    for group in groups(costs.grid, modules):
        some = [_measured(costs, layers, names) for names in subsets(group, modules)]
        found = _unbeaten(one.with_(more) for one in found for more in some)
    ordered = sorted(found, key=lambda one: (sum(one.again_s), sorted(one.modules)))
    return tuple(of_modules(one.modules) for one in ordered if one.modules)


def _measured(costs: ShapeCosts, layers: Sequence[int], names: frozenset[str]) -> _Set:
    plain, kept = costs.kept(NONE), costs.kept(of_modules(names) if names else NONE)
    singly = [of_modules([name]) for name in names]
    return _Set(
        modules=names,
        again_s=tuple(sum(costs.again_s(kind, one) for one in singly) for kind in layers),
        left_bytes=tuple(kept[kind] - plain[kind] for kind in layers),
    )


def _unbeaten(sets: Iterable[_Set]) -> list[_Set]:
    found: list[_Set] = []
    for one in sorted(sets, key=lambda each: (each.again_s, each.left_bytes)):  # what beats one comes before it
        if not any(other.beats(one) for other in found):
            found.append(one)
    return found


def groups(grid: GridCosts, modules: Modules) -> tuple[frozenset[str], ...]:
    """Modules whose steps touch no common tensor, in any kind of layer, nor are one part of the other, are in different groups."""
    layers = tuple(block for block in grid.kinds if block.role == "layer")
    return _groups(layers, grid.contexts[0], modules)


@lru_cache(maxsize=256)
def _groups(layers: tuple[Block, ...], context: Context, modules: Modules) -> tuple[frozenset[str], ...]:
    found = [frozenset((name,)) for name in modules.names]
    for block in layers:
        by_tensor: dict[str, set[str]] = {}
        for step in stacks.lower(block, context):
            for tensor in (*step.reads, *step.saves, *step.made):
                by_tensor.setdefault(tensor, set()).add(step.module)
        for together in by_tensor.values():
            found = _joined(found, together)
    for inner, outer in modules.inside:
        found = _joined(found, {inner, outer})
    return tuple(found)


def _joined(parts: list[frozenset[str]], together: set[str]) -> list[frozenset[str]]:
    touched = [part for part in parts if part & together]
    return [*(part for part in parts if not part & together), frozenset().union(*touched)] if touched else parts
