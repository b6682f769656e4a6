"""ZeroRedundancyOptimizer: whole parameters, each stepped by one rank. torch/distributed/optim/zero_redundancy_optimizer.py."""

from __future__ import annotations

import heapq

from ullage.engines.optimizer import Group, Stepped


def fullest(groups: tuple[Group, ...], ranks: int) -> tuple[Group, ...]:
    """What the rank with the most elements steps."""
    if ranks == 1:
        return groups
    return (Group(tensors=tuple(partition(groups, ranks)[fullest_rank(groups, ranks)])),)


def fullest_rank(groups: tuple[Group, ...], ranks: int) -> int:
    """The rank with the most elements, the first of several."""
    sizes = [sum(tensor.numel for tensor in mine) for mine in partition(groups, ranks)]
    return sizes.index(max(sizes))


def partition(groups: tuple[Group, ...], ranks: int) -> list[list[Stepped]]:
    """What each rank steps: each parameter, largest first, goes to the rank that has least."""
    tensors = [tensor for group in groups for tensor in group.tensors for _ in range(group.repeat)]
    heap = [(0, rank) for rank in range(ranks)]
    parts: list[list[Stepped]] = [[] for _ in range(ranks)]
    for tensor in sorted(tensors, key=lambda one: one.numel, reverse=True):
        held, rank = heap[0]
        parts[rank].append(tensor)
        heapq.heapreplace(heap, (held + tensor.numel, rank))
    return parts
