"""Bytes that one rank puts on the wire, exact, per collective and algorithm.

Payload, as nccl-tests counts it: the whole tensor for all_reduce, broadcast and send; the gathered one for all_gather; the one
before it is scattered for reduce_scatter; the send buffer of one rank for all_to_all. A group of one sends nothing.
Sources: Patarasuk and Yuan 2009 (ring, the lower bound of each rank's traffic); Sanders et al. 2009 (double binary tree);
NVIDIA/nccl-tests doc/PERFORMANCE.md (factors of the bus bandwidth).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Literal

from ullage.hardware.curve import Kind

Algorithm = Literal["ring", "tree", "hierarchical", "direct"]


def sent_bytes(kind: Kind, payload_bytes: int, ranks: int, algorithm: Algorithm = "ring") -> Fraction:
    """What the rank that sends most sends; a Fraction, since a payload need not divide by the group.

    The ring and the hierarchical algorithm send the same in total (``hierarchical_bytes`` says over which link).
    """
    return factor(kind, ranks, algorithm) * payload_bytes


def factor(kind: Kind, ranks: int, algorithm: Algorithm = "ring") -> Fraction:
    """Bytes sent by the busiest rank per byte of payload."""
    assert ranks >= 1, ranks
    if ranks == 1:
        return Fraction(0)
    if kind == "send":
        return Fraction(1)
    if kind == "broadcast":
        return Fraction(1)  # every rank but the last of the chain passes all of it on
    share = Fraction(ranks - 1, ranks)
    if kind != "all_reduce":
        return share
    if algorithm == "tree":
        # Two trees carry half each: every rank is inside one of them (half up, half down to each of two children) and a leaf
        # of the other (half up). Between two ranks each is once the root: half up and half down.
        return Fraction(1) if ranks == 2 else Fraction(2)
    return 2 * share


def once_each(copies: int, places: int) -> float:
    """Share of a token's ``copies`` (of experts picked evenly) that is sent where each of ``places`` gets it at most once."""
    return places * (1 - (1 - 1 / places) ** copies) / copies


def hierarchical_bytes(kind: Kind, payload_bytes: int, domain_ranks: int, domains: int) -> tuple[Fraction, Fraction]:
    """(inside a domain, between domains) per rank: reduce-scatter inside, the collective among peers across, all-gather inside.

    Their sum is the ring's volume, but each rank carries only 1/domain_ranks of the payload across.
    """
    if kind == "all_to_all":
        ranks = domain_ranks * domains
        return (
            Fraction(domain_ranks - 1, ranks) * payload_bytes,
            Fraction(ranks - domain_ranks, ranks) * payload_bytes,
        )
    if kind in ("send", "broadcast"):
        across = factor(kind, domains) * payload_bytes / (domain_ranks if kind == "broadcast" else 1)
        return factor(kind, domain_ranks) * payload_bytes, across
    return factor(kind, domain_ranks) * payload_bytes, factor(kind, domains) * Fraction(payload_bytes, domain_ranks)
