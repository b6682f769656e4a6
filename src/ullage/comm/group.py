"""A group of ranks as its links see it."""

from __future__ import annotations

import functools

from ullage.frozen import frozen
from ullage.hardware.cluster import Cluster


@frozen
class Group:
    """``ranks`` ranks, ``domain_ranks`` of them in each scale-up domain that the group touches.

    nic_groups: groups of the same axis that use one domain's NICs at the same time. Every rank of a domain belongs to one of
    them, so a group of one rank per domain has its own NIC's rate and no more.
    """

    ranks: int
    domain_ranks: int
    nic_groups: int = 1

    @property
    def domains(self) -> int:
        return -(-self.ranks // self.domain_ranks)


@functools.lru_cache(maxsize=1 << 12)
def axis_group(cluster: Cluster, stride: int, size: int) -> Group:
    """The groups of an axis of ``size`` ranks whose neighbours are ``stride`` global ranks apart.

    Ranks fill a scale-up domain before the next. Where a group straddles domains unevenly, its ranks are taken to be spread evenly.
    """
    assert min(stride, size) >= 1, (stride, size)
    domain = cluster.scale_up_gpus
    fitting = max(1, domain // stride)
    domains = -(-size // fitting)
    inside = -(-size // domains)
    return Group(ranks=size, domain_ranks=inside, nic_groups=max(1, min(domain, cluster.gpus) // inside))
