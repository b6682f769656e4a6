"""What was measured of a cluster's links, as a frozen value: calibration makes it, comm turns it into seconds."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ullage.frozen import frozen, hash_once

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]


@frozen
class Samples:
    """Seconds of one collective among ``ranks`` of one scale-up domain by payload, both rising."""

    kind: Kind
    ranks: int
    payload_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@frozen
class Steps:
    """An algorithm under one protocol: seconds before anything moves, seconds of a step inside a domain and between two of them,
    and the share of the bus rate that the protocol leaves."""

    base_s: float
    intra_s: float
    inter_s: float
    share: float


@frozen
class Protocol:
    """One of NCCL's protocols. limits_bytes_per_s: its most on 1, 2, 4 and more nodes; None where the link limits it."""

    name: str
    ring: Steps
    tree: Steps
    limits_bytes_per_s: tuple[float, float, float] | None = None


@frozen
class Curve:
    """The links of one cluster.

    samples: collectives inside a domain. ring_bytes_per_s: the bus rate of a large ring inside a domain.
    nic_bytes_per_s: one direction, one GPU's share of its node's NICs, as large collectives reach it.
    domain_gpus: GPUs that share one scale-up link. step_s: what a rank more than was measured adds to a collective.
    """

    samples: tuple[Samples, ...]
    ring_bytes_per_s: float
    nic_bytes_per_s: float
    domain_gpus: int
    step_s: float
    protocols: tuple[Protocol, ...]
    all_to_all_start_s: float
    intra_name: str
    inter_name: str
    intra_provenance: Literal["measured", "default"]
    inter_provenance: Literal["measured", "default"]
    source: str
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.samples, self.nic_bytes_per_s, self.domain_gpus, self.intra_name, self.inter_name)
