"""Tables of what a rank sends in a step, shared by the techniques that send."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ullage.techniques.told import Column, Part, Value
from ullage.timing.transfers import Transfer

PAYLOAD = (
    "payload: the whole tensor of an all-reduce or a send, the gathered one of an all-gather, the one before it is scattered of a "
    "reduce-scatter, one rank's send buffer of an all-to-all. wire: what this rank sends in a step, by the ring's or the tree's volume."
)

SECONDS = "Seconds are the time model's: docs/accuracy.md says how far it is from steps that were measured."

COLUMNS = (
    Column(name="phase", head="phase"),
    Column(name="of", head="of"),
    Column(name="kind", head="collective"),
    Column(name="ranks", head="ranks", unit="count"),
    Column(name="count", head="times a step", unit="count"),
    Column(name="payload_bytes", head="payload", unit="bytes"),
    Column(name="wire_bytes", head="wire, a step", unit="bytes", summed=True),
)


def wire_bytes(found: Iterable[Transfer]) -> int:
    """What a rank sends in a step, in whole bytes."""
    return math.ceil(sum(one.wire_bytes for one in found))


def of(one: Transfer) -> str:
    """``layer: qkv``"""
    return f"{one.block}: {one.what}"


def kind(one: Transfer) -> str:
    """``reduce-scatter``"""
    return one.exchange.kind.replace("_", "-")


def row(one: Transfer) -> tuple[Value, ...]:
    exchange = one.exchange
    return (
        one.phase,
        of(one),
        kind(one),
        one.group.ranks,
        one.count,
        exchange.payload_bytes,
        wire_bytes([one]),
    )


def part(title: str, about: str, found: Iterable[Transfer]) -> Part:
    """One row an exchange, as COLUMNS."""
    return Part(title=title, about=about, columns=COLUMNS, rows=tuple(row(one) for one in found))
