"""A measurement so small that a test can wait for it."""

from __future__ import annotations

from unittest import mock

from ullage.bench import measure
from ullage.bench.settings import Extent
from ullage.hardware.measured import Measured

SMALL = Extent(
    rounds=2,
    seconds=0.0,
    m=(8, 16),
    n=(8, 16),
    k=(8,),
    batched=(4,),
    moved_bytes=(2**12, 2**14),
    optimizer_numel=(2**18,),
    head_dims=(8,),
    seq=(8, 16),
    payload_bytes=(2**12, 2**20),
)


def small() -> mock._patch_dict:
    """While it is entered, what `ullage bench` measures."""
    return mock.patch.dict(vars(measure), {"extent": lambda device, quick: SMALL, "_POOL_BYTES": 2**22})


def measured() -> Measured | None:
    """As one rank."""
    with small():
        return measure.measured("cpu", True)
