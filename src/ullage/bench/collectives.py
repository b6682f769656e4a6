"""Collectives among all processes, by payload as comm/volume.py counts it, and what of one is hidden behind computing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed

from ullage.bench.clock import Clock, Pool, Task, task_of
from ullage.hardware.curve import Kind
from ullage.units import MIB

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SQUARE = (512, 512)
_LEAST_S = 1e-6
_ROUNDS = 5
_OVERLAP_BYTES = 8 * MIB


@dataclass(kw_only=True)
class Sent:
    """payload_bytes of one kind, each after a matrix product, as in a step: links and threads have gone to sleep, caches hold other
    things, and ranks arrive one after the other. product: that product alone."""

    kind: Kind
    payload_bytes: int
    task: Task
    product: Task

    def seconds(self, found: dict[int, float]) -> float:
        """found: of tasks. What the collective adds to the product."""
        return max(_LEAST_S, found[id(self.task)] - found[id(self.product)])


def product_task(pool: Pool) -> Task:
    return task_of(_product(pool))


def sent(kind: Kind, payload_bytes: int, pool: Pool, product: Task) -> Sent:
    """payload_bytes: the whole tensor, gathered or not yet scattered; of all_to_all, what one rank sends. pool: of fp32."""
    computed, send = _product(pool), _sender(kind, payload_bytes, pool)

    def run() -> None:
        computed()
        send()

    return Sent(kind=kind, payload_bytes=payload_bytes, task=task_of(run), product=product)


def _product(pool: Pool) -> Callable[[], object]:
    return lambda: pool.view(*_SQUARE) @ pool.view(*_SQUARE)


def _sender(kind: Kind, payload_bytes: int, pool: Pool) -> Callable[[], object]:
    ranks = distributed.get_world_size()
    part = max(1, payload_bytes // 4 // ranks)
    # torch 2.13 calls them by new names, and warns of the old ones
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
    if kind == "all_reduce":
        return lambda: distributed.all_reduce(pool.view(part * ranks))
    if kind == "all_gather":
        return lambda: gather(pool.view(part * ranks), pool.view(part))
    if kind == "reduce_scatter":
        return lambda: scatter(pool.view(part), pool.view(part * ranks))
    return lambda: distributed.all_to_all_single(pool.view(part * ranks), pool.view(part * ranks))


def overlap(clock: Clock, device: torch.device) -> float:
    """The share of an all-reduce that is hidden behind matrix products of the same length: 0 where the processor does both."""
    whole = torch.zeros(_OVERLAP_BYTES // 4, device=device)
    one, other = torch.randn(512, 512, device=device), torch.randn(512, 512, device=device)

    def computed(times: int) -> None:
        for _ in range(times):
            one @ other

    sent_s = _least(clock, lambda: distributed.all_reduce(whole))
    product_s = _least(clock, lambda: computed(8)) / 8
    length = torch.tensor([sent_s / product_s], device=device)
    distributed.all_reduce(length)
    times = max(1, round(float(length) / distributed.get_world_size()))
    alone_s = _least(clock, lambda: computed(times))

    def both() -> None:
        work = distributed.all_reduce(whole, async_op=True)
        computed(times)
        assert work is not None, "asynchronous"
        work.wait()

    hidden_s = sent_s + alone_s - _least(clock, both)
    found = torch.tensor([hidden_s / min(sent_s, alone_s)], device=device)
    distributed.all_reduce(found)
    return min(1.0, max(0.0, float(found) / distributed.get_world_size()))


def _least(clock: Clock, run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        clock.together()
        seconds.append(clock.seconds(run, 1))
    return min(seconds)


def host_link(device: torch.device) -> tuple[float, float]:
    """Bytes a second from pinned host memory to the GPU and back, each alone."""
    host = torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    found = []
    for to, of in ((there, host), (host, there)):
        least = float("inf")
        for _ in range(_ROUNDS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            to.copy_(of, non_blocking=True)
            torch.cuda.synchronize()
            least = min(least, time.perf_counter() - began)
        found.append(host.numel() / least)
    return found[0], found[1]
