"""DeepSpeed's reduction bucket (independent-partition-gradient, IPG) as the hooks of a backward's gradients see it.

Source: runtime/zero/stage_1_and_2.py and stage3.py, reduce_independent_p_g_buckets_and_remove_grads. A gradient's hook runs when it is
complete and still there: in the midst of its block's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from functools import lru_cache

from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held, Own, element_params, gradients_of
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory.block import GradRule
from ullage.memory.chunk import Element, Replayer
from ullage.memory.program import EMPTY, Change, Item, Node, Repeat, Sequence
from ullage.memory.rank import Rank


@frozen
class Flush:
    """One reduction of a bucket. filled: its elements. spans: they are more than one rank's. alone: it is one gradient that no
    bucket takes, which is there itself meanwhile. owns: some are this rank's own."""

    filled: int
    spans: bool
    alone: bool
    owns: bool


class Bucket:
    """What is in the bucket while a backward runs; gradients by their places among all, in model order."""

    def __init__(self, held: Held, owns: tuple[Own, ...], knobs: Knobs) -> None:
        self.held = held
        self.first_own = min((own.first for own in owns), default=0)
        self.last_own = max((own.last for own in owns), default=-1)
        self.size = knobs.reduce_bucket
        self.fill = 0
        self.places: list[int] = []

    def meets(self, place: int, numel: int) -> Flush | None:
        """A gradient is ready: the reduction that makes room for it, if one does."""
        flush = self.empties() if self.fill and self.fill + numel > self.size else None
        self.fill += numel
        self.places.append(place)
        return flush

    def empties(self) -> Flush | None:
        if not self.fill:
            return None
        flush = Flush(
            filled=self.fill,
            spans=self.held.spans_owners(self.places),
            alone=self.fill > self.size,
            owns=any(self.first_own <= place <= self.last_own for place in self.places),
        )
        self.fill = 0
        self.places = []
        return flush


Hook = Callable[[int, int], Node]
"""What a gradient's hook does, from its place and its elements; the gradient is there before and after."""


def hooked_backward(
    job: Job, rank: Rank, replayer: Replayer, elements: ListLike[Element], hook: Hook, *, added: bool = False
) -> Iterator[tuple[Element, Node]]:
    """The backward of each element, last first, with a hook's node where each of its gradients is complete. added: to one that is there
    already, so that it is gone when its hook runs."""
    params = element_params(job, rank, elements)
    place = sum(len(mine) for mine in params)
    for element, mine in zip(reversed(elements), reversed(params), strict=True):
        place -= len(mine)
        each = len(mine) // element.size
        backward = replayer.element_program(element, GradRule(mode="add")).backward
        names = _names(element, replayer)
        at = gradients_of(element.block, mine[:each], frozenset(names.values()))
        calls = []
        turns: dict[str, int] = {}
        for item in _complete(backward, frozenset(names)):
            name = names[item]
            turn = turns[name] = turns.get(name, 0) + 1
            if name in at:
                first, numel = at[name]
                calls.append(hook(place + first + (element.size - turn) * each, numel))
            else:
                calls.append(EMPTY)
        inner = _with_hooks(backward, frozenset(names), calls, added)
        yield element, Sequence([inner], f"backward of {element.block.name}")


def _names(element: Element, replayer: Replayer) -> dict[Item, str]:
    """Names of the parameters whose gradients a block's items are."""
    program = replayer.program(element.block, element.mode, GradRule(mode="keep"))
    return {item: name for name, item in program.grads}


@lru_cache(maxsize=1024)
def _complete(node: Node, grads: frozenset[Item]) -> tuple[Item, ...]:
    """The gradients in the order in which a backward lets go of them."""
    return tuple(_let_go(node, grads))


def _let_go(node: Node, grads: frozenset[Item]) -> Iterator[Item]:
    if isinstance(node, Change):
        if _is_complete(node, grads):
            yield node.item
    elif isinstance(node, Repeat):
        yield from list(_let_go(node.child, grads)) * node.times
    elif isinstance(node, Sequence):
        for child in node.children:
            yield from _let_go(child, grads)


def _is_complete(change: Change, grads: frozenset[Item]) -> bool:
    return change.count < 0 and change.item in grads


def _with_hooks(node: Node, grads: frozenset[Item], calls: ListLike[Node], added: bool) -> Node:
    return _inserted(node, grads, iter(calls), added) if any(call.changes for call in calls) else node


def _inserted(node: Node, grads: frozenset[Item], calls: Iterator[Node], added: bool) -> Node:
    if isinstance(node, Change):
        call = next(calls) if _is_complete(node, grads) else EMPTY
        return Sequence([node, call] if added else [call, node]) if call.changes else node
    if isinstance(node, Repeat):
        return Sequence([_inserted(node.child, grads, calls, added) for _ in range(node.times)])
    assert isinstance(node, Sequence)
    return Sequence([_inserted(child, grads, calls, added) for child in node.children], node.moment, node.scope)
