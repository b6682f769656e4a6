"""Sequences of varying length: what a micro-batch is padded to, one after another, where a job tells their mean and the longest.

Every length asks the allocator for other sizes: blocks that a shorter micro-batch left split do not serve a longer one, and reserved
memory climbs above what the longest needs by itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, exp, expm1, log1p

from ullage.engines.base import flag
from ullage.engines.registry import account
from ullage.job.job import Data, Job
from ullage.memory.program import Node, is_closed, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import Graph

MICRO_BATCHES = 32
"""Lengths that are played. Spread evenly, so many waste within 5 % of reserved memory what 800 in random order do (of two jobs, the
median of four orders; each order by itself is up to 9 % off that)."""

KEPT = sum(1 / (number + 1) for number in range(1, MICRO_BATCHES + 1))
"""How many times what its longest micro-batch makes a cache holds where lengths vary and nothing is known but the longest: 3.1.

Blocks of a micro-batch serve none that is longer, so each that is longer than all before it brings its own, and all of them stay. The n-th
of random lengths is such a record with probability 1 / n (Rényi 1962, Théorie des éléments saillants d'une suite d'observations), and the
longest of n is n / (n + 1) on average where all lengths up to the longest are equally likely, which is of all distributions with this
maximum the one of most entropy. The allocator's simulation comes to 3.1 too where adapters are trained and layers recomputed; to less
where tensors of other sizes leave blocks that serve, or the card is full.
"""

_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples modulo 1 are spread evenly over 0..1, however many there are (Weyl)."""


def kept_bytes(job: Job, held_bytes: int, reserved_bytes: int) -> int:
    """What a cache may hold beside ``reserved_bytes`` if lengths vary and the job tells of them no more than the longest.

    held_bytes: weights, gradients and states in it, which no length changes. None where lengths are played already, or where segments
    expand, which serve every length.
    """
    if job.data.seq_len_mean is not None or flag(job.engine.options, "expandable_segments", False):
        return 0
    return int((KEPT - 1) * max(0, reserved_bytes - held_bytes))


def padded_lengths(data: Data, multiple: int = 1) -> tuple[int, ...]:
    """Tokens to which each micro-batch is padded: its longest sequence, made a multiple.

    Only mean and maximum are known. Of all distributions with these the one of most entropy is an exponential cut off at the maximum
    (Jaynes 1957, Information Theory and Statistical Mechanics).
    """
    assert data.seq_len_mean is not None
    mean = data.seq_len_mean / data.seq_len
    longest = (
        _quantile((number * _GOLDEN % 1) ** (1 / data.micro_batch), mean) for number in range(1, MICRO_BATCHES + 1)
    )
    padded = (round_up(max(1, ceil(data.seq_len * share)), to=multiple) for share in longest)
    return tuple(min(data.seq_len, length) for length in padded)


def steps(job: Job, graph: Graph, rank: Rank) -> list[Node]:
    """A step of one micro-batch for each length; none where an engine's steps let go of what was there before them."""
    found: list[Node] = []
    layout = job.layout
    multiple = 2 * layout.cp * layout.tp if layout.sp or layout.cp > 1 else 1
    for length in padded_lengths(job.data, multiple):
        data = replace(job.data, seq_len=length, seq_len_mean=None, grad_accum=1)
        step = account(replace(job, data=data), graph, rank).step
        if not is_closed(step):
            return []
        found.append(step)
    return found


def _quantile(share: float, mean: float) -> float:
    """Of the exponential on 0..1 with this mean; increasing above one half."""
    if mean > 0.5:
        return 1 - _quantile(1 - share, 1 - mean)
    rate = _rate(mean)
    return share if rate < 1e-6 else -log1p(share * expm1(-rate)) / rate


@lru_cache(maxsize=64)
def _rate(mean: float) -> float:
    """The rate at which the exponential on 0..1 has this mean, at most one half: 1 / rate - 1 / (e^rate - 1)."""
    if mean <= 0:
        return float("inf")
    low, high = 0.0, 1 / mean
    for _ in range(60):
        middle = (low + high) / 2
        if 1 / middle - exp(-middle) / -expm1(-middle) > mean:
            low = middle
        else:
            high = middle
    return low
