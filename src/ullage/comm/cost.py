"""Seconds of one collective: latency, and the volume over the slowest link that its group crosses.

Inside a domain the measured times of the library's own choice of algorithm. Between domains NCCL's planning model: each algorithm and
protocol costs its start, its steps and its volume, and the library takes the fastest (src/graph/tuning.cc, ncclTopoGetAlgoTime).
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from typing import Literal

from ullage.comm.group import Group
from ullage.comm.volume import Algorithm, factor, once_each
from ullage.frozen import frozen
from ullage.hardware.curve import Curve, Kind, Protocol, Samples, Steps

_PAIR = 2


@frozen
class Cost:
    """seconds: of the collective alone. link: the slowest that it crosses (empty: none). algorithm: the fastest that there is."""

    seconds: float
    link: str
    algorithm: str
    provenance: Literal["exact", "measured", "default"]


_FREE = Cost(seconds=0.0, link="", algorithm="none", provenance="exact")


@functools.lru_cache(maxsize=1 << 16)
def seconds(kind: Kind, payload_bytes: int, group: Group, curve: Curve, copies: int = 1) -> Cost:
    """One collective of ``payload_bytes`` (as ``volume`` counts it). A group of one, or nothing to move, costs exactly 0 s.

    copies: of an all_to_all, experts of a token, which crosses to each domain once and is handed on inside it.
    """
    if group.ranks == 1 or payload_bytes <= 0:
        return _FREE
    if group.domains == 1:
        inside_s = _inside_s(kind, payload_bytes, group.ranks, curve)
        widest = max(one.ranks for one in curve.samples)
        provenance = curve.intra_provenance if group.ranks <= widest else "default"
        return Cost(seconds=inside_s, link=curve.intra_name, algorithm="measured", provenance=provenance)
    across_s, algorithm, slowest = _across_s(kind, payload_bytes, group, curve, copies)
    return Cost(seconds=across_s, link=slowest, algorithm=algorithm, provenance=curve.inter_provenance)


def _inside_s(kind: Kind, payload_bytes: float, ranks: int, curve: Curve) -> float:
    if kind == "send":
        # Two ranks that exchange a payload send half of it to each other, as the two directions of a pipeline do.
        return _inside_s("all_to_all", 2 * payload_bytes, _PAIR, curve)
    if kind == "broadcast":
        # A chain moves on every link what an all-gather's ring moves, and the part that the gathering rank already has.
        return _inside_s("all_gather", payload_bytes * ranks / (ranks - 1), ranks, curve)
    series = _series(curve, kind)
    above = next((index for index, one in enumerate(series) if one.ranks >= ranks), None)
    if above is None:
        return _wider_s(kind, payload_bytes, ranks, series[-1], curve)
    if series[above].ranks == ranks or above == 0:
        return _at(series[above], payload_bytes)
    low, high = series[above - 1], series[above]
    part = math.log(ranks / low.ranks) / math.log(high.ranks / low.ranks)
    return _between(_at(low, payload_bytes), _at(high, payload_bytes), part)


def _wider_s(kind: Kind, payload_bytes: float, ranks: int, widest: Samples, curve: Curve) -> float:
    """More ranks than were measured: the same bus rate, and the steps of a ring that is longer."""
    grown = _factor(kind, ranks) / _factor(kind, widest.ranks)
    rounds = 2 if kind == "all_reduce" else 1
    return _at(widest, payload_bytes * grown) + rounds * (ranks - widest.ranks) * curve.step_s


def _across_s(kind: Kind, payload_bytes: int, group: Group, curve: Curve, copies: int) -> tuple[float, str, str]:
    """(seconds, algorithm, slowest link)"""
    nics = curve.nic_bytes_per_s * curve.domain_gpus / group.nic_groups  # of one domain, for this group
    if kind == "all_to_all":
        return _exchange_s(payload_bytes, group, curve, nics, copies)
    if kind == "send":
        simple = curve.protocols[-1].ring
        rate = nics / group.domain_ranks
        return simple.base_s + simple.inter_s + payload_bytes / rate, "direct", curve.inter_name
    intra = curve.ring_bytes_per_s if group.domain_ranks > 1 else math.inf
    best = min(
        (_ring_s(kind, payload_bytes, group, protocol, min(intra, nics)), f"ring, {protocol.name}")
        for protocol in curve.protocols
    )
    if kind == "all_reduce":
        best = min(best, *(_tree_s(payload_bytes, group, protocol, curve, nics) for protocol in curve.protocols))
    return *best, curve.inter_name if nics <= intra else curve.intra_name


def _ring_s(kind: Kind, payload_bytes: int, group: Group, protocol: Protocol, bus_bytes_per_s: float) -> float:
    """NCCL's ring over all ranks: one crossing out of each domain and ranks - domains steps inside them, per round."""
    steps = protocol.ring
    rounds = 2 if kind == "all_reduce" else 1
    between = rounds * group.domains
    inside = max(0, rounds * (group.ranks - 1) - between)
    rate = _limited(bus_bytes_per_s * steps.share, protocol, group.domains)
    moved = payload_bytes * _factor(kind, group.ranks)
    return steps.base_s + inside * steps.intra_s + between * steps.inter_s + moved / rate


def _tree_s(payload_bytes: int, group: Group, protocol: Protocol, curve: Curve, nics: float) -> tuple[float, str]:
    """NCCL's double binary tree over the domains, a chain inside each: up and down."""
    steps: Steps = protocol.tree
    depth = math.log2(group.domains)
    latency = steps.base_s + 2 * ((group.domain_ranks - 1) * steps.intra_s + depth * steps.inter_s)
    across = payload_bytes * _factor("all_reduce", group.domains, "tree") / nics
    # Inside a domain an all-reduce's volume passes, with NVLink SHARP where the measured one had it.
    inside = 0.0
    if group.domain_ranks > 1:
        widest = _series(curve, "all_reduce")[-1]
        inside = payload_bytes * _marginal_s(widest)
    moved = payload_bytes * _factor("all_reduce", group.ranks)
    rate = _limited(moved / max(across, inside) * steps.share, protocol, group.domains)
    return latency + moved / rate, f"tree, {protocol.name}"


def _exchange_s(payload_bytes: int, group: Group, curve: Curve, nics: float, copies: int) -> tuple[float, str, str]:
    """Every rank sends its share to every other; what stays inside the domain, or is handed on in it, passes meanwhile."""
    rank_nic = nics / group.domain_ranks
    crossing = payload_bytes * once_each(copies, group.domains) / once_each(copies, group.ranks)
    across = crossing * (group.ranks - group.domain_ranks) / group.ranks / rank_nic
    inside = 0.0
    if group.domain_ranks > 1:
        kept = payload_bytes * (group.domain_ranks / group.ranks if copies == 1 else 1)
        inside = _inside_s("all_to_all", kept, group.domain_ranks, curve)
    return curve.all_to_all_start_s + max(across, inside), "direct", curve.inter_name


@functools.cache
def _factor(kind: Kind, ranks: int, algorithm: Algorithm = "ring") -> float:
    return float(factor(kind, ranks, algorithm))


def _limited(bus_bytes_per_s: float, protocol: Protocol, domains: int) -> float:
    if protocol.limits_bytes_per_s is None:
        return bus_bytes_per_s
    return min(bus_bytes_per_s, protocol.limits_bytes_per_s[1 if domains <= 2 else 2])


@functools.lru_cache(maxsize=1 << 10)
def _series(curve: Curve, kind: Kind) -> tuple[Samples, ...]:
    return tuple(sorted((one for one in curve.samples if one.kind == kind), key=lambda one: one.ranks))


def _at(samples: Samples, payload_bytes: float) -> float:
    """Between two payloads linear in their logarithms; below the first its time, above the last its rate of growth."""
    sizes, times = samples.payload_bytes, samples.seconds
    if payload_bytes <= sizes[0]:
        return times[0]
    if payload_bytes >= sizes[-1]:
        return times[-1] + (payload_bytes - sizes[-1]) * _marginal_s(samples)
    above = bisect_left(sizes, payload_bytes)
    low, high = above - 1, above
    part = math.log(payload_bytes / sizes[low]) / math.log(sizes[high] / sizes[low])
    return _between(times[low], times[high], part)


def _marginal_s(samples: Samples) -> float:
    """Seconds of one byte more where the payload is large."""
    sizes, times = samples.payload_bytes, samples.seconds
    return (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])


def _between(low: float, high: float, part: float) -> float:
    return low * math.pow(high / low, part)
