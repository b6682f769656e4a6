"""The `cluster` of a job file, as text (4x8xH100-SXM-80GB) or as a mapping, read strictly into a Cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ullage.errors import Contradiction, InvalidInput, UnknownKey, UnknownName, nearest
from ullage.hardware import machine, store
from ullage.hardware.cluster import Cluster, Device, Link
from ullage.hardware.store import short
from ullage.units import GIB, GIGA, MIB, TIB, parse_bytes, parse_count

# NVL576 is the widest NVLink domain that NVIDIA has announced; 2^20 nodes are more than any machine has.
MOST_GPUS_PER_NODE = 576
MOST_NODES = 2**20
# Outside these a number is a slip of unit (80 for 80GiB, 989 for 989e12), not a GPU.
_LEAST_MEMORY_BYTES, _MOST_MEMORY_BYTES = 256 * MIB, 16 * TIB
_LEAST_PER_S, _MOST_PER_S = GIGA, GIGA**2
_LONGEST_TEXT = 64
_FORMS = "8xH100-SXM-80GB, 4x8xH100-SXM-80GB (nodes x GPUs x device), 4xdgx-h100 (nodes x node type) or a mapping"
_TEXT = re.compile(r"\s*(?:(\d{1,9})\s*[x×]\s*)?(\d{1,9})\s*[x×]\s*(.*\S)\s*", re.DOTALL)
# b is bits and B is bytes, so the case matters here and nowhere else.
_RATE = re.compile(r"\s*(\d{1,9}(?:\.\d+)?)\s*([GT])(b/s|bps|bit/s|B/s|Bps)(?:[\s-]+(\S.*))?\s*")
_RATE_SCALE = {"G": GIGA, "T": 1000 * GIGA}
_CLUSTER_KEYS = ("device", "gpus_per_node", "nodes", "intra", "inter", "host_memory")
_DEVICE_KEYS = (
    "memory",
    "bf16_flops_per_s",
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "compute_capability",
    "name",
)
_LINK_KEYS = ("name", "bytes_per_s")


def cluster(spec: str | Mapping[str, object], key: str = "cluster") -> Cluster:
    """The cluster that a job file's ``cluster`` names; ``key`` is how errors call it.

    Links and host memory that the job leaves out are those of the device's default node type, if it has one.
    Raises InvalidInput, UnknownKey or UnknownName, with key, value, what is allowed and the nearest name.
    """
    if isinstance(spec, str):
        return _from_text(spec, key)
    if isinstance(spec, Mapping):
        return _from_mapping(spec, key)
    raise InvalidInput("is no cluster", key=key, value=short(spec), allowed=_FORMS)


def as_mapping(text: str) -> dict[str, object] | None:
    """A cluster's short form as the mapping that it stands for; None where it is no count and device, as a node type is not."""
    match = _TEXT.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if match is None or _is_node_type(match[3]):
        return None
    return {"device": match[3], "gpus_per_node": int(match[2]), "nodes": int(match[1] or 1)}


def _from_text(text: str, key: str) -> Cluster:
    match = _TEXT.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if match is None:
        if _is_node_type(text):
            return store.node_type(text, key)
        raise InvalidInput("is no cluster", key=key, value=short(text), allowed=_FORMS, remedy=_one_of(text))
    first, second, name = match[1], match[2], match[3]
    if _TEXT.fullmatch(name):
        raise InvalidInput("has more than two counts", key=key, value=short(text), allowed=_FORMS)
    if first is None and _is_node_type(name):
        return replace(store.node_type(name, key), nodes=_count(int(second), f"{key} (nodes)", MOST_NODES))
    nodes = _count(int(first), f"{key} (nodes)", MOST_NODES) if first is not None else 1
    gpus = _count(int(second), f"{key} (GPUs per node)", MOST_GPUS_PER_NODE)
    return _assembled(_named(name, gpus, key), gpus, nodes)


def _from_mapping(spec: Mapping[str, object], key: str) -> Cluster:
    _only_known(spec, _CLUSTER_KEYS, key)
    if "device" not in spec:
        raise InvalidInput("is missing", key=f"{key}.device", allowed="a name such as H100-SXM-80GB, or a mapping")
    gpus = _count(spec.get("gpus_per_node", 1), f"{key}.gpus_per_node", MOST_GPUS_PER_NODE)
    gpu = _device(spec["device"], gpus, f"{key}.device")
    nodes = _count(spec.get("nodes", 1), f"{key}.nodes", MOST_NODES)
    found = _assembled(gpu, gpus, nodes)
    if spec.get("intra") is not None:
        # A link that the job states reaches as far as a node; only a node type's own one is known to reach further.
        found = replace(found, intra=_link(spec["intra"], gpu, f"{key}.intra"), domain_gpus=None)
    if spec.get("inter") is not None:
        found = replace(found, inter=_link(spec["inter"], gpu, f"{key}.inter"))
    if spec.get("host_memory") is not None:
        host = parse_bytes(spec["host_memory"], f"{key}.host_memory")
        if host == 0:
            raise InvalidInput("must be positive", key=f"{key}.host_memory", value=short(spec["host_memory"]))
        found = replace(found, host_memory_bytes=host)
    return found


def _assembled(gpu: Device, gpus: int, nodes: int) -> Cluster:
    known = gpu.name in store.devices()
    node = store.default_node(gpu.name) if known else None
    intra = store.own_link(gpu)
    if gpu.vendor == "cpu" and gpu.measured is not None:
        intra = Link(name="memory of one machine, gloo", source=gpu.measured.source)
    if node is None:
        return Cluster(device=gpu, gpus_per_node=gpus, nodes=nodes, intra=intra)
    return replace(node, device=gpu, gpus_per_node=gpus, nodes=nodes, intra=intra if intra.bytes_per_s else node.intra)


def _named(name: str, gpus: int, key: str) -> Device:
    return machine.measured_device(name, gpus, key) if machine.names_one(name) else store.device(name, key)


def _device(spec: object, gpus: int, key: str) -> Device:
    if isinstance(spec, str):
        return _named(spec, gpus, key)
    if not isinstance(spec, Mapping):
        raise InvalidInput(
            "is no device", key=key, value=short(spec), allowed="a name such as H100-SXM-80GB, or a mapping"
        )
    _only_known(spec, _DEVICE_KEYS, key)
    if "memory" not in spec:
        raise InvalidInput("is missing", key=f"{key}.memory", allowed="what torch sees, such as 79.1GiB")
    memory = parse_bytes(spec["memory"], f"{key}.memory")
    if not _LEAST_MEMORY_BYTES <= memory <= _MOST_MEMORY_BYTES:
        raise InvalidInput(
            "is no GPU's memory",
            key=f"{key}.memory",
            value=short(spec["memory"]),
            allowed=f"{_LEAST_MEMORY_BYTES // MIB} MiB to {_MOST_MEMORY_BYTES // TIB} TiB",
            remedy="a number without a unit is bytes: write 80GiB",
        )
    bf16 = _rate(spec, "bf16_flops_per_s", key)
    name = spec.get("name", f"custom-{memory / GIB:g}GiB")
    if not isinstance(name, str) or not name.strip():
        raise InvalidInput("is no name", key=f"{key}.name", value=short(name), allowed="text")
    if store.normalised(name) in {store.normalised(known) for known in store.devices()}:
        raise Contradiction(
            "is a device of the catalogue",
            key=f"{key}.name",
            value=name,
            remedy=f"write device: {name}, or another name",
        )
    return Device(
        name=name,
        capacity_bytes=memory,
        compute_capability=_capability(spec.get("compute_capability"), f"{key}.compute_capability"),
        memory_bytes_per_s=_rate(spec, "memory_bytes_per_s", key),
        flops_per_s=() if bf16 is None else (("bf16", bf16),),
        link_bytes_per_s=_rate(spec, "link_bytes_per_s", key),
        source="the job file",
        provenance="exact",
    )


def _capability(value: object, key: str) -> tuple[int, int] | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,2})\.(\d)", str(value)) if isinstance(value, str | float) else None
    if match is None:
        raise InvalidInput("is no compute capability", key=key, value=short(value), allowed="such as 9.0")
    return int(match[1]), int(match[2])


def _rate(spec: Mapping[str, object], name: str, key: str) -> float | None:
    if spec.get(name) is None:
        return None
    rate = parse_count(spec[name], f"{key}.{name}")
    if not _LEAST_PER_S <= rate <= _MOST_PER_S:
        raise InvalidInput(
            "is no GPU's rate",
            key=f"{key}.{name}",
            value=short(spec[name]),
            allowed=f"{_LEAST_PER_S:.0e} to {_MOST_PER_S:.0e}",
            remedy="in units of one per second, such as 989e12",
        )
    return float(rate)


def _link(spec: object, gpu: Device, key: str) -> Link:
    if isinstance(spec, Mapping):
        _only_known(spec, _LINK_KEYS, key)
        return Link(
            name=short(spec.get("name", "custom")), bytes_per_s=_rate(spec, "bytes_per_s", key), source="the job file"
        )
    if not isinstance(spec, str):
        raise InvalidInput("is no link", key=key, value=short(spec), allowed=_link_forms())
    rate = _RATE.fullmatch(spec) if len(spec) <= _LONGEST_TEXT else None
    if rate is not None:
        bytes_per_s = float(rate[1]) * _RATE_SCALE[rate[2]] / (8 if rate[3].startswith("b") else 1)
        if bytes_per_s == 0:
            raise InvalidInput("must be positive", key=key, value=spec)
        return Link(name=rate[4] or spec.strip(), bytes_per_s=bytes_per_s, source="the job file")
    named = store.named_links()
    wanted = store.normalised(spec[:_LONGEST_TEXT])
    own = store.own_link(gpu)
    if wanted == store.normalised(own.name):
        return own  # a card may have fewer links of a generation than the full one: an H800 has 8 of NVLink 4's 18
    if wanted in named:
        return named[wanted]
    match = nearest(wanted, named)
    raise UnknownName(
        "is no link",
        key=key,
        value=short(spec),
        allowed=_link_forms(),
        remedy=f"did you mean {match}?" if match else None,
    )


def _link_forms() -> str:
    return f"{', '.join(store.named_links())}, or the share of one GPU such as 400Gb/s-IB or 50GB/s"


def _count(value: object, key: str, most: int) -> int:
    count = parse_count(value, key)
    if not 1 <= count <= most:
        raise InvalidInput("is out of range", key=key, value=short(value), allowed=f"1 to {most}")
    return count


def _only_known(spec: Mapping[str, object], known: tuple[str, ...], key: str) -> None:
    for name in spec:
        if name not in known:
            match = nearest(str(name)[:_LONGEST_TEXT], known)
            raise UnknownKey(
                "is no key here",
                key=f"{key}.{short(name)}",
                value=short(spec[name]),
                allowed=", ".join(known),
                remedy=f"did you mean {match}?" if match else None,
            )


def _is_node_type(name: str) -> bool:
    return store.normalised(name) in {store.normalised(node) for node in store.node_types()}


def _one_of(text: str) -> str | None:
    """The remedy for a bare device name: counts are always written."""
    try:
        return f"for one GPU write 1x{store.device(text).name}"
    except InvalidInput:
        return None
