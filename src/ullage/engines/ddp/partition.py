"""ZeroRedundancyOptimizer: whole parameters, each stepped by one rank. torch/distributed/optim/zero_redundancy_optimizer.py."""

from __future__ import annotations

import heapq

from ullage.engines.optimizer import Group, Stepped


def fullest(groups: tuple[Group, ...], ranks: int) -> tuple[Group, ...]:
    """What the rank with the most elements steps, when each parameter, largest first, goes to the rank that has least."""
    if ranks == 1:
        return groups
    tensors = [tensor for group in groups for tensor in group.tensors for _ in range(group.repeat)]
    heap = [(0, rank) for rank in range(ranks)]
    mine: list[list[Stepped]] = [[] for _ in range(ranks)]
    for tensor in sorted(tensors, key=lambda one: one.numel, reverse=True):
        held, rank = heap[0]
        mine[rank].append(tensor)
        heapq.heapreplace(heap, (held + tensor.numel, rank))
    _, worst = max((held, -rank) for held, rank in heap)
    return (Group(tensors=tuple(mine[-worst])),)
