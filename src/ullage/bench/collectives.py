"""Collectives among all processes, by payload as comm/volume.py counts it, and what of one is hidden behind computing."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import distributed

from ullage.bench.clock import Clock, Task
from ullage.hardware.curve import Kind
from ullage.units import MIB

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_ROUNDS = 5
_OVERLAP_BYTES = 8 * MIB


def task(kind: Kind, payload_bytes: int, device: torch.device) -> Task:
    """payload_bytes: the whole tensor, gathered or not yet scattered; of all_to_all, what one rank sends."""
    ranks = distributed.get_world_size()
    numel = max(ranks, payload_bytes // 4 // ranks * ranks)

    # torch 2.13 calls them by new names, and warns of the old ones
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

    def made() -> Callable[[], object]:
        whole = torch.zeros(numel, device=device)
        part = torch.zeros(numel // ranks, device=device)
        if kind == "all_reduce":
            return lambda: distributed.all_reduce(whole)
        if kind == "all_gather":
            return lambda: gather(whole, part)
        if kind == "reduce_scatter":
            return lambda: scatter(part, whole)
        received = torch.empty_like(whole)
        return lambda: distributed.all_to_all_single(received, whole)

    return Task(prepared=made)


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
