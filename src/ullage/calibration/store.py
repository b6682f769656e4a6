"""The measured tables in data/, and which of their entries speaks for a device.

An entry of the device itself is ``measured``; one that stands for it (a device of the same architecture, or of any) is ``default``.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ullage.frozen import frozen
from ullage.hardware.cluster import Device

DATA = Path(__file__).parent / "data"

Provenance = Literal["measured", "default"]


@frozen
class Value:
    """One number of a look-up. provenance: measured on this device, or default where another entry stands for it."""

    value: float
    provenance: Provenance
    source: str


def efficiency(value: float, provenance: Provenance, source: str) -> Value:
    """A share of a peak; one outside (0, 1] is a fault of the tables, never of the user."""
    assert 0.0 < value <= 1.0, (value, source)
    return Value(value=value, provenance=provenance, source=source)


def weaker(one: Provenance, other: Provenance) -> Provenance:
    """The provenance of what was made from both."""
    return "measured" if one == other == "measured" else "default"


@functools.cache
def table(name: str) -> Mapping[str, Any]:
    """data/``name``.toml."""
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


def speaker(name: str, device: Device) -> tuple[str, Provenance]:
    """The device whose entries of table ``name`` speak for ``device``.

    Itself or the same silicon under another memory size (``same_silicon``), else the one that stands for its architecture, else
    the one that stands for all.
    """
    data = table(name)
    devices = data["devices"]
    if device.name in devices:
        return device.name, "measured"
    twin = data.get("same_silicon", {}).get(device.name)
    if twin is not None:
        return twin, "measured"
    stands_for = data["stands_for"]
    return stands_for.get(device.architecture, stands_for["any"]), "default"
