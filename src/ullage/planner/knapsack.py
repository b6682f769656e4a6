"""Which modules to recompute: an exact knapsack of the bytes that a layer leaves behind against the seconds that it takes longer.

What is freed by one module does not add to what another frees: a norm's output goes only where all that save it run again. Modules whose
steps touch a common tensor are weighed together, every set of them; groups that share none add up, so that of each group only the sets
that no other set beats are carried on to the next (the dynamic programme of a knapsack with a front in place of a capacity). With
several kinds of layer a set is beaten only where another is no worse in every kind: pipeline ranks hold different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ullage.job.job import Recompute
from ullage.kernels import stacks
from ullage.kernels.stacks import Modules
from ullage.kernels.step import Context
from ullage.model.graph import Block
from ullage.planner.space import NONE, of_modules, subsets

if TYPE_CHECKING:
    from ullage.planner.costs import GridCosts
    from ullage.planner.growing import Growing


class Chosen(NamedTuple):
    """A set of modules. Of each kind of layer, the seconds of its recomputation and the bytes that it leaves behind more than one that
    recomputes nothing. A search makes a hundred thousand."""

    modules: frozenset[str]
    again_s: tuple[float, ...]
    left_bytes: tuple[int, ...]

    @property
    def recompute(self) -> Recompute:
        return of_modules(self.modules)


Cost = tuple[float, ...]
"""Seconds of each kind of layer, then bytes."""


class Groups:
    """The modules of a grid in groups that share no tensor: what of each group may run again, and what that takes and leaves.

    layers: kinds of block that are layers.
    """

    def __init__(self, grid: GridCosts, modules: Modules) -> None:
        self.layers = [kind for kind, block in enumerate(grid.kinds) if block.role == "layer"]
        self._grid, self._names = grid, modules.names
        number = {name: at for at, name in enumerate(modules.names)}
        plain = [grid.kept(kind, NONE) for kind in self.layers]
        self._choices = [
            [
                (names, sorted(number[name] for name in names), self._left(grid, of_modules(names), plain))
                for names in subsets(group, modules)
                if names
            ]
            for group in groups(grid, modules)
        ]

    @cached_property
    def _again(self) -> list[list[Growing]]:
        """What runs again of each module, in each kind of layer: not asked for where no set of them has room."""
        return [[self._grid.again(kind, of_modules([name])) for kind in self.layers] for name in self._names]

    def _left(self, grid: GridCosts, how: Recompute, plain: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Of each kind of layer the bytes of one sequence, and of each one more."""
        kept = (grid.kept(kind, how) for kind in self.layers)
        return [(first - of_plain, each - more) for (first, each), (of_plain, more) in zip(kept, plain, strict=True)]

    def measured(self, micro_batch: int) -> list[list[Chosen]]:
        """Of each group its sets, the empty one first."""
        more = micro_batch - 1
        singly = [tuple([one.seconds(micro_batch) for one in each]) for each in self._again]
        nothing = Chosen(frozenset(), (0.0,) * len(self.layers), (0,) * len(self.layers))
        return [
            [
                nothing,
                *[
                    Chosen(
                        names,
                        singly[numbers[0]]
                        if len(numbers) == 1
                        else tuple(map(sum, zip(*[singly[one] for one in numbers], strict=True))),
                        tuple([first + each * more for first, each in left]),
                    )
                    for names, numbers, left in some
                ],
            ]
            for some in self._choices
        ]

    def smallest(self, micro_batch: int) -> list[int]:
        """Of each kind of layer the bytes that it leaves behind more than one that recomputes nothing, under whichever sets leave least of
        it: nothing, or less."""
        more = micro_batch - 1
        return [
            sum([min([0, *[left[at][0] + left[at][1] * more for _, _, left in some]]) for some in self._choices])
            for at in range(len(self.layers))
        ]


def front(measured: Iterable[Sequence[Chosen]]) -> tuple[Chosen, ...]:
    """Of groups with their sets, the sets over all of them that no other beats, the fastest first; not the one that recomputes nothing."""
    found: list[tuple[Cost, frozenset[str]]] | None = None
    for some in measured:
        own = [((*one.again_s, *one.left_bytes), one.modules) for one in some]
        if found is None:
            found = _unbeaten(own)
            continue
        found = _unbeaten(
            (tuple([a + b for a, b in zip(cost, more, strict=True)]), names | others)
            for cost, names in found
            for more, others in own
        )
    if not found:
        return ()
    kinds = len(found[0][0]) // 2
    ordered = sorted(found, key=lambda one: (sum(one[0][:kinds]), sorted(one[1])))
    return tuple(Chosen(names, cost[:kinds], tuple(map(int, cost[kinds:]))) for cost, names in ordered if names)


def _unbeaten(sets: Iterable[tuple[Cost, frozenset[str]]]) -> list[tuple[Cost, frozenset[str]]]:
    found: list[tuple[Cost, frozenset[str]]] = []
    for one in sorted(sets, key=lambda each: each[0]):  # what beats one comes before it
        cost = one[0]
        for other, _ in found:
            for mine, its in zip(cost, other, strict=True):
                if mine < its:
                    break
            else:
                break
        else:
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
