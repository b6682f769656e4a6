"""Seconds of a block's forward, backward and recomputation on one rank, by part."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ullage.frozen import frozen
from ullage.hardware.cluster import Cluster
from ullage.job.job import Layout, Recompute
from ullage.kernels import stacks
from ullage.kernels.step import Context
from ullage.memory.chunk import CHECKPOINT, SELECTIVE
from ullage.model.graph import Block
from ullage.timing.machine import attention_s, matmul_s, sent_s, traffic_s
from ullage.timing.ops import block_work
from ullage.timing.work import OpWork, Pass

COMPUTE, MEMORY = "matmul", "memory"
ATTENTION = "attention"


@frozen
class Parts:
    """Seconds by part: matmul, attention, memory, and what is waited for on each axis (tp, cp, ep, ...)."""

    items: tuple[tuple[str, float], ...] = ()

    @property
    def total_s(self) -> float:
        return sum(value for _, value in self.items)

    def __add__(self, other: Parts) -> Parts:
        return added((self, other))

    def times(self, factor: float) -> Parts:
        return Parts(items=tuple((name, value * factor) for name, value in self.items))


def added(parts: Iterable[Parts]) -> Parts:
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items:
            sums[name] = sums.get(name, 0.0) + value
    return Parts(items=tuple(sums.items()))


@frozen
class BlockTime:
    """One block, one micro-batch. recompute: what the backward runs again before it."""

    forward: Parts
    backward: Parts
    recompute: Parts = Parts()

    @property
    def backward_s(self) -> float:
        return self.backward.total_s + self.recompute.total_s


@frozen
class Place:
    """Where a block runs: all that its time depends on beside the block and its context."""

    cluster: Cluster
    layout: Layout
    attention: str


@lru_cache(maxsize=16384)
def block_time(block: Block, context: Context, place: Place, mode: str, recompute: Recompute) -> BlockTime:
    """mode: of memory/chunk.py."""
    work = block_work(block, context)
    again = Parts()
    if mode == CHECKPOINT:
        again = added(_forward(one, place) for one in work)
    elif mode == SELECTIVE:
        modules = _recomputed_modules(block, context, recompute)
        again = added(_forward(one, place) for one in work if one.module in modules)
    return BlockTime(
        forward=added(_forward(one, place) for one in work),
        backward=added(_backward(one, place) for one in work),
        recompute=again,
    )


def _recomputed_modules(block: Block, context: Context, recompute: Recompute) -> frozenset[str]:
    steps = stacks.lower(block, context)
    return frozenset(
        steps[at].module
        for segment in stacks.segments(block, context, recompute)
        for at in range(segment.start, segment.stop)
    )


def _forward(work: OpWork, place: Place) -> Parts:
    return _seconds(work.forward, place, backward=False)


def _backward(work: OpWork, place: Place) -> Parts:
    return _seconds(work.backward, place, backward=True)


def _seconds(work: Pass, place: Place, *, backward: bool) -> Parts:
    device = place.cluster.device
    matmuls = [matmul_s(device, one) for one in work.matmuls]
    attention = attention_s(device, work.attention, place.attention, backward=backward) if work.attention else 0.0
    memory = sum(traffic_s(device, one) for one in work.traffic)
    cover = {"": 0.0, "attention": attention}
    if backward and matmuls:
        cover |= {"dgrad": sum(matmuls[0::2]), "wgrad": sum(matmuls[1::2])}
    items = [(COMPUTE, sum(matmuls)), (ATTENTION, attention), (MEMORY, memory)]
    for one in work.exchanges:
        wait = max(0.0, sent_s(place.cluster, place.layout, one) - cover.get(one.behind, 0.0))
        items.append((one.axis, wait))
    return added([Parts(items=tuple(item for item in items if item[1]))])
