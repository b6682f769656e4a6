"""From reserved to device: the CUDA context and the communicators, which no allocator counts."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.hardware import overheads
from ullage.hardware.cluster import Cluster
from ullage.hardware.overheads import Overhead

CollectiveGroup = tuple[str, int, int]
"""Name, ranks, and nodes crossed of a process group that a rank communicates in."""


def outside_allocator(cluster: Cluster, groups: Sequence[CollectiveGroup]) -> tuple[Overhead, ...]:
    """Everything of one process on its GPU that is outside torch's allocator."""
    device = cluster.device
    return (
        overheads.context(device),
        *(overheads.communicator(device, size, nodes) for _, size, nodes in groups if size > 1),
    )
