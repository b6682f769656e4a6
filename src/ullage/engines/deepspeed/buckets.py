"""When a backward's reduction bucket fills, and what that takes: DeepSpeed's independent-partition-gradient (IPG) buckets."""

from __future__ import annotations

from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held, Own
from ullage.frozen import frozen


@frozen
class Flush:
    """One reduction of a bucket, in elements.

    waiting: the gradient that there was no room for (0 at the end). filled: what the bucket has. concatenated: the same if it is more
    than one rank's, else 0. alone: of a gradient that no bucket takes, which is there itself meanwhile.
    """

    waiting: int
    filled: int
    concatenated: int
    alone: int


@frozen
class Buckets:
    """Moments of a backward as numbers of blocks (last first) that have run: bucket: it is allocated; flush: the first one is full;
    own: the first own gradients are reduced. flushes: every kind of reduction that the backward has."""

    bucket: int
    flush: int
    own: int
    flushes: frozenset[Flush]


def plan(
    numels: list[tuple[int, ...]], held: Held, owns: tuple[Own, ...], knobs: Knobs, *, tied: bool = False
) -> Buckets:
    """Walks the gradients of a backward (``numels``: of each block in model order) through buckets.

    A gradient larger than a bucket is reduced alone; it is concatenated too if more than one rank owns it.
    """
    del tied  # a shared weight's gradient is ready only when both its uses have run; it is counted with the embedding
    last_own = max((own.last for own in owns), default=-1)
    bucket = flush = own = fill = 0
    flushes: set[Flush] = set()
    place = start = sum(len(block) for block in numels)  # the bucket has the gradients from place to start
    for ran, block in enumerate(reversed(numels), start=1):
        for numel in reversed(block):
            bucket = bucket or ran
            if fill and fill + numel > knobs.reduce_bucket:
                flush = flush or ran
                flushes.add(_flush(held, range(place, start), fill, numel, knobs))
                own = own or (ran if place <= last_own else 0)
                fill, start = 0, place
            fill += numel
            place -= 1
    if fill:
        flushes.add(_flush(held, range(place, start), fill, 0, knobs))
    end = len(numels)
    return Buckets(bucket=min(bucket or end, end), flush=flush or end, own=own or end, flushes=frozenset(flushes))


def _flush(held: Held, places: range, fill: int, waiting: int, knobs: Knobs) -> Flush:
    return Flush(
        waiting=waiting,
        filled=fill,
        concatenated=fill if held.spans_owners(places) else 0,
        alone=fill if fill > knobs.reduce_bucket else 0,
    )
