"""When a backward's reduction bucket fills, and what that takes: DeepSpeed's independent-partition-gradient (IPG) buckets."""

from __future__ import annotations

from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held, Own
from ullage.frozen import frozen


@frozen
class Buckets:
    """Moments of a backward as numbers of blocks (last first) that have run, and sizes in elements.

    bucket: it is allocated; flush: the first one is full; own: the first own gradients are reduced.
    waiting: the largest gradient that waits for room; alone: the largest that no bucket takes, 0 where none is.
    filled: the fullest bucket; concatenated: the same if more than one rank owns it, else 0.
    """

    bucket: int
    flush: int
    own: int
    waiting: int
    alone: int
    filled: int
    concatenated: int


def plan(
    numels: list[tuple[int, ...]], held: Held, owns: tuple[Own, ...], knobs: Knobs, *, tied: bool = False
) -> Buckets:
    """Walks the gradients of a backward (``numels``: of each block in model order) through buckets.

    A gradient larger than a bucket is reduced alone; it is concatenated too if more than one rank owns it.
    """
    del tied  # a shared weight's gradient is ready only when both its uses have run; it is counted with the embedding
    last_own = max((own.last for own in owns), default=-1)
    bucket = flush = own = 0
    largest_fill = concatenated = waiting = fill = 0
    place = start = sum(len(block) for block in numels)  # the bucket has the gradients from place to start
    for ran, block in enumerate(reversed(numels), start=1):
        for numel in reversed(block):
            bucket = bucket or ran
            if fill and fill + numel > knobs.reduce_bucket:
                flush = flush or ran
                waiting = max(waiting, numel)
                largest_fill, concatenated = _filled(held, range(place, start), fill, largest_fill, concatenated)
                own = own or (ran if place <= last_own else 0)
                fill, start = 0, place
            fill += numel
            place -= 1
    largest_fill, concatenated = _filled(held, range(place, start), fill, largest_fill, concatenated)
    largest = max((numel for block in numels for numel in block), default=0)
    end = len(numels)
    return Buckets(
        bucket=min(bucket or end, end),
        flush=flush or end,
        own=own or end,
        waiting=waiting,
        alone=largest if largest > knobs.reduce_bucket else 0,
        filled=largest_fill,
        concatenated=concatenated,
    )


def _filled(held: Held, places: range, fill: int, largest: int, concatenated: int) -> tuple[int, int]:
    """The fullest bucket, and the fullest that is concatenated, with one more."""
    spans = bool(places) and held.spans_owners(places)
    return max(largest, fill), max(concatenated, fill if spans else 0)
