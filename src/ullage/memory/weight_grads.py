"""The weight gradients that a block's backward makes, and what becomes of them under the engine's rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ullage import dtypes
from ullage.kernels.step import Buffer, Step, WeightGrad
from ullage.memory.block import GradRule
from ullage.memory.program import Item
from ullage.memory.storage import Items, Storages


class WeightGrads:
    """kept: the gradients that stay, by weight. views: of them, those that are views of a matmul's result."""

    __slots__ = ("_items", "_live", "_rule", "_uses", "kept", "views")

    def __init__(self, steps: Iterable[Step], rule: GradRule, live: Storages, items: Items) -> None:
        self._rule = rule
        self._live = live
        self._items = items
        self._uses = Counter(weight.param for step in steps for weight in step.weights)
        self.kept: dict[str, Item] = {}
        self.views: set[str] = set()

    def make(self, weight: WeightGrad) -> Item | None:
        """Makes a weight's gradient; returns the tensor that the engine takes at once, if any.

        A weight that is used several times gathers its gradients first: the second is added out of place where the first is a view
        of a matmul's result, later ones in place.
        """
        rule = self._rule
        if rule.mode == "fused" and weight.fusable:
            return None
        self._uses[weight.param] -= 1
        made = self._items.weight_gradient(weight, weight.dtype)
        self._live.alloc(made)
        adds = rule.mode in ("add", "fused") or weight.param in rule.added
        taken = adds and not self._uses[weight.param] and weight.param not in rule.pending
        if weight.param in self.kept:
            self._join(weight, made)
            return self.kept.pop(weight.param) if taken else None
        if taken:
            return made
        self._keep(weight, made)
        return None

    def _join(self, weight: WeightGrad, made: Item) -> None:
        before = self.kept[weight.param]
        if weight.param in self.views:
            self.views.remove(weight.param)
            self._live.alloc(before)
            self._live.free(before)
        self._live.free(made)

    def _keep(self, weight: WeightGrad, made: Item) -> None:
        """As autograd makes it, or cast; what the engine adds up is cast as it takes it."""
        dtype = self._rule.dtype
        if self._rule.mode != "keep" or dtype is None or dtype == weight.dtype:
            self.kept[weight.param] = made
            if weight.fusable:
                self.views.add(weight.param)
            return
        self.kept[weight.param] = self._items.weight_gradient(weight, dtype)
        self._live.alloc(self.kept[weight.param])
        self._live.free(made)

    def take(self, weight: WeightGrad, item: Item) -> None:
        """The engine takes a weight gradient at once; where it steps the optimizer with it, that has temporaries."""
        used = [
            self._items.tensor(
                Buffer(
                    f"{weight.param}.step{at}",
                    dtypes.size_bytes(weight.numel, dtype),
                    f"optimizer step of {weight.param}",
                ),
                "transient",
                "the optimizer's step inside the backward",
            )
            for at, dtype in enumerate(self._rule.temporaries)
        ]
        self._live.alloc(*used)
        self._live.free(*used, item)
