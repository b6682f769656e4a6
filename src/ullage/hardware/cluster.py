"""Devices, links and clusters as frozen values. catalogue.py makes them from data files, spec.py from a job's `cluster`."""

from __future__ import annotations

from dataclasses import field

from ullage.frozen import frozen, hash_once
from ullage.hardware.measured import Measured


@frozen
class Device:
    """One GPU. capacity_bytes: what torch sees (cudaMemGetInfo total), not what is printed on the box.

    capacity_range_bytes: the lowest and highest reading found: it moves with the driver, and with ECC on GDDR cards.
    compute_capability: (major, minor) of an NVIDIA part, None elsewhere: it decides library workspaces.
    architecture: ampere, hopper, ... on NVIDIA, the gfx name on AMD.
    flops_per_s: dense peak by element type (FMA = 2 FLOPs).
    link_*: the scale-up link (NVLink, xGMI), one direction, all links together; None where there is none.
    host_link_bytes_per_s: to the host (PCIe, NVLink-C2C), one direction.
    provenance: of the capacity, measured or default.
    measured: what `ullage bench` measured of the very machine; None: the packaged tables speak for the device. vendor is cpu where the
    ranks are processes on the host, which share its cores and its memory.
    """

    name: str
    capacity_bytes: int
    capacity_range_bytes: tuple[int, int] | None = None
    vendor: str = "nvidia"
    architecture: str = ""
    compute_capability: tuple[int, int] | None = None
    memory_bytes_per_s: float | None = None
    flops_per_s: tuple[tuple[str, float], ...] = ()
    link_name: str | None = None
    link_count: int | None = None
    link_bytes_per_s: float | None = None
    host_link_name: str | None = None
    host_link_bytes_per_s: float | None = None
    source: str = ""
    provenance: str = "measured"
    measured: Measured | None = None
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.name, self.capacity_bytes, self.memory_bytes_per_s, self.flops_per_s)


@frozen
class Link:
    """A link that a group of ranks crosses, one direction, per GPU."""

    name: str
    bytes_per_s: float | None = None
    source: str = ""


@frozen
class Cluster:
    """``nodes`` nodes of ``gpus_per_node`` equal devices.

    domain_gpus: GPUs that the intra link joins, where that is more than a node (72 in an NVL72 rack); None: one node.
    """

    device: Device
    gpus_per_node: int
    nodes: int = 1
    intra: Link = field(default_factory=lambda: Link(name="unknown"))
    inter: Link = field(default_factory=lambda: Link(name="unknown"))
    host_memory_bytes: int | None = None
    domain_gpus: int | None = None
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.device, self.gpus_per_node, self.nodes, self.intra, self.inter, self.domain_gpus)

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def scale_up_gpus(self) -> int:
        """Consecutive GPUs that reach each other over ``intra``; a group that spans more crosses ``inter``."""
        return min(self.gpus, max(self.gpus_per_node, self.domain_gpus or 0))
