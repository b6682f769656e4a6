"""Sizes and counts, parsed and written. The only file where 1024 and 10^9 stand.

Inside ullage a size is an ``int`` of bytes, a time a ``float`` of seconds, work an ``int`` of FLOPs.
``GB`` is 10^9 bytes and ``GiB`` is 2^30 bytes; ``K``, ``M``, ``B``, ``T`` after a bare count are powers of ten.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ullage.errors import InvalidInput

if TYPE_CHECKING:
    from decimal import Decimal

KIB = 1024
MIB = KIB**2
GIB = KIB**3
TIB = KIB**4
GIGA = 10**9
MICROSECONDS = 10**6
"""In one second."""

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": GIGA,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": GIGA, "t": 10**12}
_NUMBER_WITH_UNIT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*([A-Za-z]*)\s*")
_LONGEST_TEXT = 64
_BEYOND = 2**63  # no size or count reaches it; past it a float or an int64 of ours would overflow


def parse_bytes(value: object, key: str = "size") -> int:
    """A number of bytes, or a text with a unit (``80GB``, ``74.5 GiB``), as bytes.

    Raises InvalidInput for a negative or non-finite size, an unknown unit, or anything that is no size.
    """
    return _parse(value, key, _SIZE_UNITS, "a number of bytes, or one with KB, MB, GB, TB, KiB, MiB, GiB or TiB")


def parse_count(value: object, key: str = "count") -> int:
    """A count: an integer, a float that is whole, or a text such as ``5e8`` or ``7B``."""
    return _parse(value, key, _COUNT_UNITS, "a whole number, 5e8 or 7B")


def _parse(value: object, key: str, units: dict[str, int], allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise InvalidInput("is no number", key=key, value=_short(value), allowed=allowed)
    if isinstance(value, str):
        match = _NUMBER_WITH_UNIT.fullmatch(value) if len(value) <= _LONGEST_TEXT else None
        unit = units.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise InvalidInput("is no number", key=key, value=_short(value), allowed=allowed)
        from decimal import Decimal

        # Decimal, since 8.03 * 10^9 is no whole number in binary
        number: int | float | Decimal = Decimal(match[1]) * unit
    else:
        number = value
    if not 0 <= number < _BEYOND:  # false for nan too
        raise InvalidInput("must be at least 0 and below 2^63", key=key, value=_short(value), allowed=allowed)
    if number != int(number) and units is _COUNT_UNITS:
        raise InvalidInput("must be whole", key=key, value=_short(value), allowed=allowed)
    return int(number)


def _short(value: object) -> str:
    if isinstance(value, int) and abs(value) > _BEYOND:
        value = hex(value)  # Python refuses to write a very long integer in decimal
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def gib(n_bytes: float) -> float:
    """Bytes as GiB (2^30)."""
    return n_bytes / GIB


def mib(n_bytes: float) -> float:
    """Bytes as MiB (2^20)."""
    return n_bytes / MIB


def gb(n_bytes: float) -> float:
    """Bytes as GB (10^9)."""
    return n_bytes / GIGA


def format_bytes(n_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1: ``22.35 GiB``."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes:.0f} B"


def format_count(count: float) -> str:
    """A count in thousands, millions, billions or trillions: ``8.03B``."""
    for unit, size in (("T", 10**12), ("B", GIGA), ("M", 10**6), ("K", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """A time in seconds, milliseconds or microseconds, the largest that leaves a number of at least 1: ``389.44 µs``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:,.2f} {unit}"
    return f"{seconds * MICROSECONDS:.2f} µs" if seconds else "0 s"


def unit_bytes(name: str) -> int | None:
    """Bytes of a unit of sizes (``GiB``, ``MB``, ``bytes``, ``kB``, also in the PiB and EiB of nonsense figures); None: no unit."""
    return _UNITS_PRINTED.get(name.lower())


_UNITS_PRINTED = _SIZE_UNITS | {
    "byte": 1,
    "bytes": 1,
    "pb": 10**15,
    "eb": 10**18,
    "pib": KIB**5,
    "eib": KIB**6,
    "k": KIB,
    "m": MIB,
    "g": GIB,
}
