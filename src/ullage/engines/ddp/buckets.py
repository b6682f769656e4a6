"""The reducer's buckets: flat copies of all gradients, there from the constructor to the end of the run.

Source: torch/csrc/distributed/c10d/reducer.cpp. The first iteration reduces everything in one bucket (or the constructor's, with
find_unused_parameters); from the second on, buckets follow the order in which gradients became ready.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.engines.base import sized
from ullage.job.adapted import adapters_type
from ullage.job.job import Job
from ullage.memory.program import Item
from ullage.memory.rank import Rank
from ullage.units import MIB

DEFAULT_CAP_MIB = 25
"""DistributedDataParallel(bucket_cap_mb=25)."""
FIRST_CAP_BYTES = MIB
"""dist._DEFAULT_FIRST_BUCKET_BYTES."""
_BYTES = {"fp32": 4}


def bucket(job: Job, rank: Rank) -> Item:
    """All buckets as one line; ``pieces`` are the buckets."""
    dtype = job.precision.params if job.lora is None else adapters_type(job)
    width = _BYTES.get(dtype, 2)
    cap = job.engine.options.get("bucket_cap_mb", DEFAULT_CAP_MIB)
    assert isinstance(cap, int | float), cap
    pieces = tuple(_filled(_reversed(rank), width, int(cap * MIB)))
    return sized(
        "communication",
        "DDP reducer buckets",
        sum(pieces),
        dtype,
        pieces=pieces,
        why=f"every gradient once more, in {len(pieces)} buckets of {cap} MiB",
        lives="constructor to the end of the run",
    )


def _reversed(rank: Rank) -> Iterator[int]:
    """Elements of each parameter in the order in which a backward makes their gradients."""
    held = {param.name: param.numel for param in rank.params if param.param.trainable}
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
