"""The reducer's buckets: flat copies of all gradients, there from the constructor to the end of the run.

Source: torch/csrc/distributed/c10d/reducer.cpp. The first iteration reduces everything in one bucket (or the constructor's, with
find_unused_parameters); from the second on, buckets follow the order in which gradients became ready.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.engines.base import sized
from ullage.job.job import Job
from ullage.memory.program import Item
from ullage.memory.rank import LocalParam, Rank
from ullage.units import MIB

DEFAULT_CAP_MIB = 25
"""DistributedDataParallel(bucket_cap_mb=25)."""
FIRST_CAP_BYTES = MIB
"""dist._DEFAULT_FIRST_BUCKET_BYTES."""
_BYTES = {"fp32": 4}


def buckets(job: Job, rank: Rank) -> Iterator[Item]:
    """Those of each type as one line, whose ``pieces`` are the buckets: gradients of two types share none."""
    cap = job.engine.options.get("bucket_cap_mb", DEFAULT_CAP_MIB)
    assert isinstance(cap, int | float), cap
    for dtype, numels in _by_type(job, rank).items():
        pieces = tuple(_filled(iter(numels), _BYTES.get(dtype, 2), int(cap * MIB)))
        yield sized(
            "communication",
            "DDP reducer buckets",
            sum(pieces),
            dtype,
            pieces=pieces,
            why=f"every gradient once more, in {len(pieces)} buckets of {cap} MiB",
            lives="constructor to the end of the run",
        )


def _by_type(job: Job, rank: Rank) -> dict[str, list[int]]:
    """Elements of each parameter that is trained, in the order in which a backward makes their gradients."""
    found: dict[str, list[int]] = {}
    for local in _reversed(rank):
        found.setdefault(local.param.elements or job.precision.params, []).append(local.numel)
    return found


def _reversed(rank: Rank) -> Iterator[LocalParam]:
    held = {param.name: param for param in rank.params if param.param.trainable}
    for part in reversed(rank.chunks):
        for run in reversed(part.runs):
            names = [f"{run.block.name}.{param.name}" for param in reversed(run.block.params)]
            for _ in range(run.repeat):
                yield from (held[name] for name in names if name in held)


def _filled(numels: Iterator[int], width: int, cap: int) -> Iterator[int]:
    """A bucket is closed by the parameter that fills it (compute_bucket_assignment_by_size)."""
    limit, filled = FIRST_CAP_BYTES, 0
    for numel in numels:
        filled += numel
        if filled * width >= limit:
            yield filled
            limit, filled = cap, 0
    if filled:
        yield filled
