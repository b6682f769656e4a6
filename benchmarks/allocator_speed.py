"""How fast the caching allocator is simulated: 200,000 events of a training-like sequence, allocated and freed.

A step allocates per block a few saved tensors and short-lived temporaries, then frees the saved ones in reverse order
among gradients, which is what makes an allocator split and merge. Exits with 1 where it takes longer than the limit.
Run: python benchmarks/allocator_speed.py
"""

from __future__ import annotations

import random
import sys
import time

from ullage.memory.allocator import FREE_EVENT, CachingAllocator

EVENTS = 200_000
LAYERS = 64
SEED = 0
LIMIT_S = 1.0
RUNS = 3

Event = tuple[int, int, int]


def training_like(n_events: int) -> list[Event]:
    """Steps of ``LAYERS`` blocks, forward then backward; sizes from a few hundred bytes to 64 MiB."""
    rng = random.Random(SEED)
    sizes = [int(2 ** rng.uniform(8, 26)) for _ in range(12)]
    events: list[Event] = []
    fresh = 0
    while len(events) < n_events:
        saved: list[list[int]] = []
        for _ in range(LAYERS):
            kept: list[int] = []
            for size in sizes:
                events += [(fresh, size, 0), (fresh + 1, 2 * size, 0), (fresh + 1, FREE_EVENT, 0)]
                kept.append(fresh)
                fresh += 2
            saved.append(kept)
        for kept in reversed(saved):
            for name, size in zip(reversed(kept), reversed(sizes), strict=True):
                events += [(fresh, size, 0), (name, FREE_EVENT, 0), (fresh, FREE_EVENT, 0)]
                fresh += 1
    return events[:n_events]


def seconds(events: list[Event], *, expandable: bool) -> float:
    """The best of a few runs, each on a fresh allocator."""
    best = float("inf")
    for _ in range(RUNS):
        allocator = CachingAllocator(expandable_segments=expandable)
        start = time.perf_counter()
        allocator.replay(events)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> int:
    events = training_like(EVENTS)
    slow = False
    for expandable in (False, True):
        taken = seconds(events, expandable=expandable)
        slow |= taken > LIMIT_S
        print(f"expandable_segments={expandable}: {len(events):,} events in {taken:.2f} s")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
