"""Memory beside the tensors: the CUDA context and NCCL (outside torch's allocator), library workspaces (inside it).

Every number stands in data/overheads.toml with its source; here is only how they combine.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from ullage.frozen import frozen
from ullage.hardware.cluster import Device
from ullage.hardware.store import DATA

Provenance = Literal["measured", "default", "exact"]


@frozen
class Overhead:
    """One thing that takes memory on one GPU. low_bytes..high_bytes: where it was or may be; bytes lies between them.

    provenance: measured on this architecture, exact where the library's source fixes it, default where neither.
    """

    what: str
    bytes: int
    low_bytes: int
    high_bytes: int
    provenance: Provenance
    source: str


def context(device: Device, *, lazy: bool = True) -> Overhead:
    """The CUDA context of one process; ``lazy``: modules load when used (CUDA 11.7 and later), else all at once."""
    if device.vendor == "cpu":
        return _process(device)
    default = _data()["context_default"]
    entry = next(
        (e for e in _data()["context"] if tuple(e["compute_capability"]) == device.compute_capability), default
    )
    loaded = entry["lazy_bytes"]
    eager = entry.get("eager_bytes", max(default["eager_bytes"], loaded))
    provenance: Provenance = entry["provenance"]
    if lazy:
        low = entry.get("lazy_low_bytes", min(default["low_bytes"], loaded) if entry is default else loaded)
        return _overhead("CUDA context", loaded, low, eager, provenance, entry)
    if "eager_bytes" not in entry:
        provenance = "default"
    return _overhead("CUDA context", eager, loaded, entry.get("eager_high_bytes", eager), provenance, entry)


def _process(device: Device) -> Overhead:
    """A process on the CPU before it has a tensor: torch's own libraries, as `ullage bench` found them resident."""
    measured = device.measured
    size = 0 if measured is None else measured.process_bytes
    source = {"source": device.source}
    return _overhead("process with torch", size, size, size, "measured", source)


def first_collective(device: Device) -> Overhead:
    """What the first collective of a process loads and keeps, beside the communicator's buffers."""
    entry = _data()["first_collective"]
    if device.vendor == "cpu":
        return _overhead("first collective", 0, 0, 0, "exact", entry)
    return _overhead("first collective", entry["bytes"], 0, entry["high_bytes"], entry["provenance"], entry)


def communicator(device: Device, group_size: int, nodes_crossed: int = 1) -> Overhead:
    """The buffers of one NCCL communicator of ``group_size`` ranks on ``nodes_crossed`` nodes, for collectives.

    A node is what one scale-up link joins, as NCCL sees it: a whole NVL72 rack is one.
    bytes: the ring on every channel, and NVLink SHARP where the device has it. low: the ring alone (NCCL_NVLS_ENABLE=0).
    high: rings and trees connected, in whole pages, as releases before 2.22 connect them at once.
    """
    nccl = _data()["nccl"]
    what = f"NCCL communicator of {group_size}"
    if group_size <= 1 or device.vendor == "cpu":  # gloo's buffers are those of its sockets
        return _overhead(what, 0, 0, 0, "exact", nccl)
    across = nodes_crossed > 1
    channels = _channels(device, across)
    ring = channels * nccl["connection_bytes"]
    local = -(-group_size // nodes_crossed)
    nvls, nvls_high = _nvls_bytes(device, local, across)
    trees = nccl["tree_connections_across" if across else "tree_connections_in_node"]
    connections = 1 + min(trees, group_size - 1)
    high = channels * connections * nccl["connection_page_bytes"] + nvls_high
    measured = device.link_bytes_per_s is not None and _is_in(device, nccl["measured_on"])
    return _overhead(
        what, ring + nvls, ring, max(high, nccl["least_high_bytes"]), "measured" if measured else "default", nccl
    )


def point_to_point(device: Device, peers_in_node: int, peers_across: int = 0) -> Overhead:
    """What send and receive add to a communicator: all-to-all, and the links of a pipeline.

    peers_in_node: ranks of this node that this rank sends to or receives from; peers_across: those of other nodes.
    """
    nccl = _data()["nccl"]
    entry = nccl["point_to_point"]
    if device.vendor == "cpu":
        return _overhead("gloo send and receive", 0, 0, 0, "exact", entry)
    # Channels per peer are the least over all pairs of the communicator, and the network gives two.
    per_peer = _next_power_of_two(_channels(device, across=False))
    far = far_high = 0
    if peers_across > 0:
        per_peer = min(per_peer, entry["channels_per_peer_across"])
        both_directions = 2 * entry["chunks"]
        far = _next_power_of_two(_channels(device, across=True)) * both_directions * entry["chunk_bytes"]
        far_high = entry["channels_high"] * both_directions * entry["chunk_high_bytes"]
    near = peers_in_node * per_peer * nccl["connection_page_bytes"]
    low = peers_in_node * min(per_peer, entry["channels_per_peer_across"]) * nccl["connection_bytes"] + far
    what = f"NCCL send and receive with {peers_in_node + peers_across} peers"
    return _overhead(what, near + far, low, near + max(far, far_high), "default", entry)


def cublas_workspace_bytes(device: Device, *, hopper_only: bool = False) -> Overhead:
    """torch's cuBLAS workspace per handle and stream. ``hopper_only``: torch from before Blackwell."""
    entry = _data()["cublas"]
    if device.vendor == "cpu":
        return _overhead("no cuBLAS", 0, 0, 0, "exact", entry)
    if device.vendor == "amd":
        large = device.architecture in entry["rocm_large_architectures"]
        size = entry["rocm_large_bytes" if large else "rocm_bytes"]
        return _overhead("hipBLAS workspace", size, size, size, "exact", entry)
    major = device.compute_capability[0] if device.compute_capability else 0
    majors = [9] if hopper_only else entry["large_majors"]
    size = entry["large_bytes" if major in majors else "small_bytes"]
    # A device of unknown capability may have either.
    high = size if device.compute_capability else entry["large_bytes"]
    provenance: Provenance = "exact" if device.compute_capability else "default"
    return _overhead("cuBLAS workspace", size, size, high, provenance, entry)


def te_workspace_bytes(device: Device, *, streams: int = 1) -> Overhead:
    """Transformer Engine's GEMM workspace; a grouped GEMM has one per compute stream."""
    entry = _data()["te"]
    major = device.compute_capability[0] if device.compute_capability else 0
    size = streams * entry["large_bytes" if major >= 9 else "small_bytes"]
    high = size if device.compute_capability else streams * entry["large_bytes"]
    provenance: Provenance = "exact" if device.compute_capability else "default"
    return _overhead("Transformer Engine GEMM workspace", size, size, high, provenance, entry)


def deterministic_attention_workspace_bytes(
    device: Device, *, batch: int, heads: int, seq_q: int, seq_kv: int
) -> Overhead:
    """cuDNN's workspace of a deterministic attention backward: quadratic up to a cap on Hopper, else none."""
    entry = _data()["cudnn_attention"]
    hopper = device.compute_capability is not None and device.compute_capability[0] == 9
    quadratic = batch * heads * seq_q * seq_kv * entry["element_bytes"] if hopper else 0
    size = min(quadratic, entry["cap_bytes"])
    return _overhead("cuDNN deterministic attention workspace", size, 0, size, "default" if hopper else "exact", entry)


def _channels(device: Device, across: bool) -> int:
    nccl = _data()["nccl"]
    if device.link_bytes_per_s is None:
        return int(nccl["channels_pcie"])
    most: int = nccl["channels_across" if across else "channels_in_node"]
    if device.link_count is None:
        return most
    return min(most, device.link_count * int(nccl["channels_per_link"]))


def _nvls_bytes(device: Device, local: int, across: bool) -> tuple[int, int]:
    """(bytes, high) of NVLink SHARP's buffers: Hopper and later on NVSwitch, more than two GPUs of the group in a node."""
    entry = _data()["nccl"]["nvls"]
    capability = device.compute_capability
    if capability is None or capability[0] < 9 or device.link_bytes_per_s is None or local < entry["least_gpus"]:
        return 0, 0
    channels, chunk_high = entry["channels"], entry["chunk_bytes"]
    if capability[0] >= 10:
        channels = entry["channels_blackwell_across" if across else "channels_blackwell_in_node"]
        chunk_high = entry["chunk_high_bytes"]
    chunks = channels * 2 * entry["steps"] * min(local, entry["most_heads"])
    return chunks * entry["chunk_bytes"], chunks * chunk_high


def _is_in(device: Device, capabilities: list[list[int]]) -> bool:
    return device.compute_capability is not None and list(device.compute_capability) in capabilities


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _overhead(what: str, size: int, low: int, high: int, provenance: Provenance, entry: Mapping[str, Any]) -> Overhead:
    assert 0 <= low <= size <= high, (what, low, size, high)
    return Overhead(
        what=what, bytes=size, low_bytes=low, high_bytes=high, provenance=provenance, source=entry["source"]
    )


@functools.cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads((DATA / "overheads.toml").read_text(encoding="utf-8"))
