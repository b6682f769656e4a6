"""What allocated bytes have room for on a device: an estimate's interval (engines/interval.py), read backwards.

A plan fits where the high end of its interval is below the device's memory, and that end is what is allocated times how far measured runs
of such jobs lay above their estimates. Where routing is uneven that is a third, so that a bound which leaves it out lets pass most of what
does not fit.
"""

from __future__ import annotations

from ullage.engines.base import Account
from ullage.engines.interval import kind, spread
from ullage.hardware import overheads
from ullage.job.job import Job
from ullage.memory.program import EMPTY

_ACCOUNTS = (Account(static=(), step=EMPTY), Account(static=(), step=EMPTY, warnings=("not modelled",)))
"""All that a kind of uncertainty reads of an account is whether it warns of something."""


def least_high(job: Job) -> float:
    """How many times what is allocated an estimate's high end is at the least, whatever the job's account warns of."""
    return min(_high(kind(job, one)) for one in _ACCOUNTS)


def _high(name: str) -> float:
    """Where texts fill the allocator's cache, it takes a card to its capacity and not above it: what is needed beyond any doubt is less."""
    high = spread(name).high
    return min(high, spread("model").high) if name == "texts" else high


def room_bytes(job: Job) -> int:
    """What fits is allocated no more."""
    outside = overheads.context(job.cluster.device, lazy=True)
    return int((job.cluster.device.capacity_bytes - outside.high_bytes) / least_high(job))
