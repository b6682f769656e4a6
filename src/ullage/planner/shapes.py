"""What the blocks of a grid cost one rank with a micro-batch, under one loss or under whichever costs least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from ullage.engines.base import context_of
from ullage.frozen import frozen
from ullage.job.job import Job, Recompute
from ullage.kernels.step import Context
from ullage.planner.costs import GridCosts
from ullage.planner.knapsack import Chosen, front
from ullage.planner.space import NONE


@frozen
class BlockCost:
    """dense, experts, frozen_bytes: of its parameters on this rank (costs.Numels). forward_s, backward_s: without recomputation."""

    dense: int
    experts: int
    frozen_bytes: float
    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


class ShapeCosts:
    """The kinds of block of a graph as a job of one shape runs them; what is asked for late is computed late.

    A kind is an index into ``kinds(graph)``: a search looks it up a million times.
    """

    def __init__(self, grid: GridCosts, job: Job, like: ShapeCosts | None = None) -> None:
        """like: the same shape with the loss of the grid that this one is like."""
        micro_batch = job.data.micro_batch
        blocks = [] if like is None else list(like.blocks)
        for kind in range(len(grid.kinds)) if like is None else grid.own_kinds:
            (dense, experts, frozen_bytes), (forward, backward) = grid.numels[kind], grid.works[kind]
            one = BlockCost(
                dense=dense,
                experts=experts,
                frozen_bytes=frozen_bytes,
                forward_s=forward.seconds(micro_batch),
                backward_s=backward.seconds(micro_batch),
            )
            blocks[kind : kind + 1] = [one]
        self._of(grid, job, blocks, (self,))

    def _of(self, grid: GridCosts, job: Job, blocks: list[BlockCost], under: tuple[ShapeCosts, ...]) -> None:
        """under: with each loss."""
        self.grid, self.job, self.blocks, self.under = grid, job, blocks, under
        self.micro_batch = job.data.micro_batch
        self.is_layer = grid.is_layer
        self._kept: dict[object, list[int]] = {}
        self.shortest_s = min([one.both_s for one, layer in zip(blocks, grid.is_layer, strict=True) if layer])
        self.first_s = self._role_s("embedding")
        self.last_s = self._role_s("head", "loss")
        self.whole_s = sum(times * self.blocks[kind].both_s for kind, times, _ in grid.runs)

    @cached_property
    def layers_s(self) -> list[float]:
        """Of each layer, in model order."""
        runs = [(self.blocks[kind].both_s, times) for kind, times, role in self.grid.runs if role == "layer"]
        return [seconds for seconds, times in runs for _ in range(times)]

    @cached_property
    def longest(self) -> tuple[float, int]:
        """Of the kind of layer that takes most seconds in all: those of one of them, and how many there are."""
        counts: Counter[int] = Counter()
        for kind, times, role in self.grid.runs:
            counts[kind] += times if role == "layer" else 0
        found = [(self.blocks[kind].both_s, count) for kind, count in counts.items()]
        return max(found, key=lambda one: one[0] * one[1])

    @cached_property
    def sent_bytes(self) -> int:
        """A layer's output, which a pipeline rank sends on."""
        first, each = self.grid.sent_bytes
        return first + each * (self.micro_batch - 1)

    @cached_property
    def groups(self) -> list[list[Chosen]]:
        """Of each group of modules that share no tensor the sets of them, the empty one first."""
        return self.grid.groups.measured(self.micro_batch)

    @cached_property
    def selections(self) -> tuple[Chosen, ...]:
        """Sets of modules to recompute that no other set beats."""
        return front(self.groups)

    @cached_property
    def smallest(self) -> list[int]:
        """Of each kind, the bytes that it leaves behind under whichever set of modules leaves least of it."""
        found = list(self.kept(NONE))
        groups = self.grid.groups
        for kind, less in zip(groups.layers, groups.smallest(self.micro_batch), strict=True):
            found[kind] += less
        return found

    def _role_s(self, *roles: str) -> float:
        return sum(times * self.blocks[kind].both_s for kind, times, role in self.grid.runs if role in roles)

    @cached_property
    def context(self) -> Context:
        return context_of(self.job, self.grid.graph)

    def again_s(self, kind: int, recompute: Recompute) -> float:
        """Seconds of a block's recomputation in one backward."""
        if recompute.kind == "none":
            return 0.0
        if recompute.kind == "full" and not self.grid.place.early_stop and not self.job.compile:
            return self.blocks[kind].forward_s
        return self.grid.again(kind, recompute).seconds(self.micro_batch)

    def kept(self, recompute: Recompute) -> list[int]:
        """Of each kind, the bytes that one more such block in a chunk leaves behind after a forward; of layers, recomputed like this."""
        key = (recompute.kind, recompute.modules)
        if key not in self._kept:
            self._kept[key] = [
                self.grid.kept_bytes(kind, recompute if block.role == "layer" else NONE, self.micro_batch)
                for kind, block in enumerate(self.grid.kinds)
            ]
        return self._kept[key]

    def send_s(self, job: Job) -> float:
        """Seconds in which a stage's output is sent on."""
        return self.grid.send_s(job)

    def wire_s(self, job: Job) -> list[tuple[float, float]]:
        """Of each kind of block, seconds in which its parameters are gathered and its gradients reduced, by themselves."""
        return self.grid.wire_s(job)


class LeastCosts(ShapeCosts):
    """A shape whose loss is not chosen: of each kind of block the least, layers being the same under any."""

    def __init__(self, under: Sequence[ShapeCosts]) -> None:
        blocks = [
            BlockCost(
                dense=some[0].dense,
                experts=some[0].experts,
                frozen_bytes=some[0].frozen_bytes,
                forward_s=min([one.forward_s for one in some]),
                backward_s=min([one.backward_s for one in some]),
            )
            for some in zip(*(one.blocks for one in under), strict=True)
        ]
        self._of(under[0].grid, under[0].job, blocks, tuple(under))

    def kept(self, recompute: Recompute) -> list[int]:
        key = (recompute.kind, recompute.modules)
        if key not in self._kept:
            found = list(self.under[0].kept(recompute))
            for other in self.under[1:]:
                for kind in other.grid.own_kinds:
                    how = recompute if self.is_layer[kind] else NONE
                    found[kind] = min(found[kind], other.grid.kept_bytes(kind, how, self.micro_batch))
            self._kept[key] = found
        return self._kept[key]
