"""The curve of a cluster's links: nccl-tests inside a scale-up domain, NCCL's planning constants and fabrics' rates between them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ullage.calibration.store import Provenance, speaker, table
from ullage.hardware.catalogue import device as catalogued
from ullage.hardware.cluster import Cluster, Device
from ullage.hardware.curve import Curve, Kind, Protocol, Samples, Steps
from ullage.units import GIGA

_MICRO = 1e-6
_PROTOCOLS = ("LL", "Simple")
_KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@functools.lru_cache(maxsize=256)
def curve(cluster: Cluster) -> Curve:
    """Everything that ``comm.cost`` needs to know of the cluster's links. Sources: data/collectives.toml, data/network.toml."""
    by_pcie = _is_pcie(cluster)
    measured = cluster.device.measured
    name, intra_provenance = _speaker(cluster.device, by_pcie)
    row = table("collectives")["devices"][name]
    nominal = cluster.intra.bytes_per_s
    measured_on = _own_bytes_per_s(catalogued(name))
    slower = measured_on / nominal if nominal and measured_on else 1.0
    if slower != 1.0 or nominal is None:
        intra_provenance = "default"
    samples = tuple(
        _samples(kind, int(ranks), row[kind][ranks], slower) for kind in _KINDS for ranks in sorted(row[kind])
    )
    source = row["source"]
    if measured is not None and measured.collectives:
        samples, intra_provenance, source = measured.collectives, "measured", measured.source
    network, fabric, inter_provenance = table("network"), *_fabric(cluster.inter.name)
    nic = cluster.inter.bytes_per_s
    if nic is None:
        nic, inter_provenance = network["unknown_link"]["bytes_per_s"], "default"
    step = "pcie_us" if by_pcie else "nvlink_us"
    return Curve(
        samples=samples,
        ring_bytes_per_s=_large_ring(samples),
        nic_bytes_per_s=nic * fabric["rate"],
        domain_gpus=cluster.scale_up_gpus,
        step_s=network["nccl"]["LL"]["ring"][step] * _MICRO,
        protocols=tuple(
            _protocol(protocol, step, fabric["step"], cluster.device.architecture) for protocol in _PROTOCOLS
        ),
        all_to_all_start_s=network["all_to_all"]["start_us"] * _MICRO,
        intra_name=cluster.intra.name,
        inter_name=cluster.inter.name,
        intra_provenance=intra_provenance,
        inter_provenance=inter_provenance,
        source=f"{source}; {network['nccl']['source']}; {fabric['source']}",
    )


def _is_pcie(cluster: Cluster) -> bool:
    return "pcie" in cluster.intra.name.casefold() or (
        cluster.intra.bytes_per_s is None and cluster.device.link_bytes_per_s is None
    )


def _speaker(device: Device, by_pcie: bool) -> tuple[str, Provenance]:
    name, provenance = speaker("collectives", device)
    has_own_link = catalogued(name).link_bytes_per_s is not None
    if by_pcie and has_own_link:
        return table("collectives")["stands_for"]["pcie"], "default"
    return name, provenance


def _own_bytes_per_s(device: Device) -> float | None:
    return device.link_bytes_per_s or device.host_link_bytes_per_s


def _samples(kind: Kind, ranks: int, microseconds: list[float], slower: float) -> Samples:
    """One series, rising: where a larger payload was faster, the smaller one's time was noise.

    slower: how much less the link carries than the one that was measured; what passes before the first byte does not change.
    """
    seconds: list[float] = []
    for us in reversed(microseconds):
        seconds.append(min(us * _MICRO, seconds[-1]) if seconds else us * _MICRO)
    seconds.reverse()
    start = seconds[0]
    return Samples(
        kind=kind,
        ranks=ranks,
        payload_bytes=tuple(float(size) for size in table("collectives")["payload_bytes"]),
        seconds=tuple(start + (second - start) * slower for second in seconds),
    )


def _large_ring(samples: tuple[Samples, ...]) -> float:
    """The bus rate at which a large all-gather's next bytes pass, among the most ranks that were measured."""
    widest = max((one for one in samples if one.kind == "all_gather"), key=lambda one: one.ranks)
    n_bytes = widest.payload_bytes[-1] - widest.payload_bytes[-2]
    return n_bytes / (widest.seconds[-1] - widest.seconds[-2]) * (widest.ranks - 1) / widest.ranks


def _fabric(name: str) -> tuple[Mapping[str, Any], Provenance]:
    network = table("network")
    for fabric in network["fabrics"]:
        if any(word in name.casefold() for word in fabric["words"]):
            return fabric, "measured"
    return network["any_fabric"], "default"


def _protocol(name: str, step: str, slower: float, architecture: str) -> Protocol:
    row = table("network")["nccl"][name]
    limits = row.get("bus_limit")
    most = None
    if limits is not None:
        one, two, more = limits.get(architecture, limits["any"])
        most = (one * GIGA, two * GIGA, more * GIGA)
    return Protocol(
        name=name,
        ring=_steps(row["ring"], step, slower),
        tree=_steps(row["tree"], step, slower),
        limits_bytes_per_s=most,
    )


def _steps(row: Mapping[str, float], step: str, slower: float) -> Steps:
    return Steps(
        base_s=row["base_us"] * _MICRO,
        intra_s=row[step] * _MICRO,
        inter_s=row["network_us"] * slower * _MICRO,
        share=row["share"],
    )
