"""From reserved to device: the CUDA context and the communicators, which no allocator counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ullage.hardware import overheads
from ullage.hardware.cluster import Cluster
from ullage.hardware.overheads import Overhead

CollectiveGroup = tuple[str, int, int]
"""Name, ranks, and nodes crossed of a process group that a rank communicates in."""


def outside_allocator(
    cluster: Cluster, groups: Sequence[CollectiveGroup], *, eager: bool = False
) -> tuple[Overhead, ...]:
    """Everything of one process on its GPU that is outside torch's allocator.

    eager: software from before CUDA 11.7 and NCCL 2.22, which loaded every module and made every connection at once.
    """
    device = cluster.device
    communicators = [overheads.communicator(device, size, nodes) for _, size, nodes in groups if size > 1]
    if eager:
        communicators = [replace(one, bytes=one.high_bytes) for one in communicators]
    return (overheads.context(device, lazy=not eager), *communicators)
