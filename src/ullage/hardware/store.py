"""Devices and node types from data/: one TOML file each, read when it is asked for and not before.

Adding a device: one file in data/devices named after it; adding a spelling: one line in data/aliases.toml.
"""

from __future__ import annotations

import functools
import os
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ullage.errors import InvalidInput, UnknownName, nearest
from ullage.hardware.cluster import Cluster, Device, Link

DATA = Path(__file__).parent / "data"
_SUFFIX = ".toml"
# Words that drivers and shops put before a model's name, normalised.
_MAKERS = ("nvidia", "geforce", "tesla", "amd", "instinct", "intel", "habana", "huawei")
# Longer than any name: what is longer is cut before it is matched or shown.
_LONGEST_NAME = 64
_BOUNDED = reprlib.Repr()
_BOUNDED.maxlevel = 2


def devices() -> tuple[str, ...]:
    """The names of all devices of the catalogue, sorted."""
    return tuple(sorted(_index("devices").values()))


def node_types() -> tuple[str, ...]:
    """The names of all node types of the catalogue (dgx-h100, aws-p5, ...), sorted."""
    return tuple(sorted(_index("clusters").values()))


def device(name: str, key: str = "device") -> Device:
    """The device of that name or alias, whatever its case, hyphens, spaces and underscores.

    Raises UnknownName, which lists the candidates of an ambiguous alias or names the nearest device.
    """
    return _device(_resolve(name, key))


def node_type(name: str, key: str = "cluster") -> Cluster:
    """One node of a named type: its device, links and host memory. Raises UnknownName."""
    stem = _index("clusters").get(_checked(name, key))
    if stem is None:
        raise UnknownName("is no node type", key=key, value=short(name), allowed=", ".join(node_types()))
    return _node(stem)


def default_node(name: str) -> Cluster | None:
    """The node type that stands for the device of that name where a job names none; None if no data file says one."""
    stem = _file("devices", _resolve(name, "device")).get("node")
    return _node(stem) if stem is not None else None


def aliases() -> Mapping[str, tuple[str, ...]]:
    """Every other spelling, as written in data/aliases.toml, with the devices it may mean."""
    return {spelling: tuple(names) for spelling, names in _toml(DATA / "aliases.toml")["aliases"].items()}


def normalised(name: str) -> str:
    """A name as it is compared: lower case, without separators and makers' words."""
    text = "".join(letter for letter in name.casefold() if letter not in " -_\t")
    while maker := next((word for word in _MAKERS if text.startswith(word) and text != word), None):
        text = text.removeprefix(maker)
    return text


@functools.cache
def named_links() -> Mapping[str, Link]:
    """The links that a job file may name (nvlink4, pcie5, ...), by normalised name."""
    return {name: _link(table) for name, table in _toml(DATA / "links.toml")["links"].items()}


def _resolve(name: str, key: str) -> str:
    wanted = _checked(name, key)
    known = _index("devices")
    if wanted in known:
        return known[wanted]
    others = _aliases()
    candidates = others.get(wanted, ())
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UnknownName(
            "names more than one device", key=key, value=short(name), allowed=", ".join(candidates), remedy="say which"
        )
    spellings = {**{alias: names[0] for alias, names in others.items() if len(names) == 1}, **known}
    match = nearest(wanted[:_LONGEST_NAME], spellings)
    hint = f"did you mean {spellings[match]}? " if match else ""
    raise UnknownName(
        "is no device of the catalogue", key=key, value=short(name), remedy=f"{hint}`ullage devices` lists them all"
    )


def _checked(name: object, key: str) -> str:
    if not isinstance(name, str) or not name.strip():
        raise InvalidInput("is no name", key=key, value=short(name), allowed="a name such as H100-SXM-80GB")
    return normalised(name)


@functools.cache
def _index(folder: str) -> Mapping[str, str]:
    """Normalised name -> file stem, from the folder's listing alone: no file is opened to find another."""
    stems = (file.removesuffix(_SUFFIX) for file in os.listdir(DATA / folder) if file.endswith(_SUFFIX))
    return {normalised(stem): stem for stem in stems}


@functools.cache
def _aliases() -> Mapping[str, tuple[str, ...]]:
    return {normalised(spelling): names for spelling, names in aliases().items()}


@functools.cache
def _file(folder: str, stem: str) -> Mapping[str, Any]:
    return _toml(DATA / folder / f"{stem}{_SUFFIX}")


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@functools.cache
def _device(stem: str) -> Device:
    data = _file("devices", stem)
    memory, link, host = data["memory"], data.get("link", {}), data.get("host_link", {})
    capability = data.get("compute_capability")
    return Device(
        name=data["name"],
        capacity_bytes=memory["capacity_bytes"],
        capacity_range_bytes=(memory["low_bytes"], memory["high_bytes"]),
        vendor=data["vendor"],
        architecture=data["architecture"],
        compute_capability=(capability[0], capability[1]) if capability else None,
        memory_bytes_per_s=data.get("memory_bandwidth", {}).get("bytes_per_s"),
        flops_per_s=tuple((dtype, peak["flops_per_s"]) for dtype, peak in data.get("flops", {}).items()),
        link_name=link.get("name"),
        link_count=link.get("count"),
        link_bytes_per_s=link.get("bytes_per_s"),
        host_link_name=host.get("name"),
        host_link_bytes_per_s=host.get("bytes_per_s"),
        source=memory["source"],
        provenance=memory["provenance"],
    )


@functools.cache
def _node(stem: str) -> Cluster:
    data = _file("clusters", stem)
    gpu = _device(data["device"])
    return Cluster(
        device=gpu,
        gpus_per_node=data["gpus_per_node"],
        intra=_link(data["intra"]) if "intra" in data else own_link(gpu),
        inter=_link(data["inter"]) if "inter" in data else Link(name="unknown"),
        host_memory_bytes=data.get("host", {}).get("memory_bytes"),
        domain_gpus=data.get("domain_gpus"),
    )


def own_link(gpu: Device) -> Link:
    """The fastest way from one GPU to the next that the device itself brings: its scale-up link, else its host link."""
    if gpu.link_bytes_per_s is not None:
        return Link(name=gpu.link_name or "scale-up", bytes_per_s=gpu.link_bytes_per_s, source=gpu.name)
    if gpu.host_link_bytes_per_s is not None:
        return Link(name=gpu.host_link_name or "host", bytes_per_s=gpu.host_link_bytes_per_s, source=gpu.name)
    return Link(name="unknown")


def _link(table: Mapping[str, Any]) -> Link:
    return Link(name=table["name"], bytes_per_s=table["bytes_per_s"], source=table["source"])


def short(value: object) -> str:
    """A value as an error shows it: bounded, however long or deeply nested it is."""
    text = value if isinstance(value, str) else _BOUNDED.repr(value)
    return text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + "…"
