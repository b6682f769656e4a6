"""The `cluster` of a job file: every form that is right, and one clear error for each that is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage.errors import Contradiction, InvalidInput, UllageError, UnknownKey, UnknownName
from ullage.hardware.catalogue import cluster, device, devices
from ullage.hardware.spec import MOST_GPUS_PER_NODE, MOST_NODES
from ullage.units import GIB


@pytest.mark.parametrize(
    ("text", "name", "gpus", "nodes"),
    [
        ("8xH100-SXM-80GB", "H100-SXM-80GB", 8, 1),
        ("4x8xH100-SXM-80GB", "H100-SXM-80GB", 8, 4),
        ("1xRTX-4090-24GB", "RTX-4090-24GB", 1, 1),
        (" 2 x 8 x NVIDIA A100-SXM4-80GB ", "A100-SXM-80GB", 8, 2),
        ("8x4090", "RTX-4090-24GB", 8, 1),
        ("2x8xMI300X-192GB", "MI300X-192GB", 8, 2),
        ("64x4xGB200-192GB", "GB200-192GB", 4, 64),
        ("dgx-h100", "H100-SXM-80GB", 8, 1),
        ("2xaws-p4d", "A100-SXM-40GB", 8, 2),
    ],
)
def test_a_cluster_as_text(text: str, name: str, gpus: int, nodes: int) -> None:
    found = cluster(text)
    assert (found.device.name, found.gpus_per_node, found.nodes) == (name, gpus, nodes)
    assert found.gpus == gpus * nodes


@given(
    name=st.sampled_from(devices()),
    gpus=st.integers(1, MOST_GPUS_PER_NODE),
    nodes=st.integers(1, MOST_NODES),
)
def test_text_and_mapping_say_the_same(name: str, gpus: int, nodes: int) -> None:
    mapping = {"device": name, "gpus_per_node": gpus, "nodes": nodes}
    assert cluster(f"{nodes}x{gpus}x{name}") == cluster(mapping)


def test_a_node_type_brings_links_and_memory() -> None:
    found = cluster("4x8xH100-SXM-80GB")
    assert (found.intra.name, found.intra.bytes_per_s) == ("NVLink 4", 450e9)
    assert found.inter.bytes_per_s == 50e9
    assert found.host_memory_bytes == 2 * 10**12


def test_links_reach_a_rack_where_they_do() -> None:
    assert cluster("32x4xGB200-192GB").scale_up_gpus == 72
    assert cluster("4x4xGB200-192GB").scale_up_gpus == 16
    assert cluster("4x8xH100-SXM-80GB").scale_up_gpus == 8


def test_a_cluster_as_mapping() -> None:
    found = cluster(
        {
            "device": "H800",
            "gpus_per_node": "8",
            "nodes": 4,
            "intra": "nvlink4",
            "inter": "400Gb/s-IB",
            "host_memory": "2TB",
        }
    )
    # An H800 has fewer of NVLink 4's links than an H100.
    assert found.intra.bytes_per_s == device("H800").link_bytes_per_s == 200e9
    assert (found.inter.name, found.inter.bytes_per_s) == ("IB", 50e9)
    assert found.host_memory_bytes == 2 * 10**12


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("400Gb/s", 50e9), ("50GB/s", 50e9), ("1.6Tbps-RoCE", 200e9), ("pcie5", 63e9)]
)
def test_a_links_rate_is_bits_or_bytes_as_written(text: str, bytes_per_s: float) -> None:
    assert cluster({"device": "L40S", "inter": text}).inter.bytes_per_s == bytes_per_s


def test_a_device_of_ones_own() -> None:
    spec = {"memory": "80GiB", "bf16_flops_per_s": "989e12", "memory_bytes_per_s": 3.35e12, "compute_capability": "9.0"}
    found = cluster({"device": spec}).device
    assert found.capacity_bytes == 80 * GIB
    assert found.flops_per_s == (("bf16", 989e12),)
    assert found.memory_bytes_per_s == 3.35e12
    assert found.compute_capability == (9, 0)


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("8xA100", UnknownName, ["A100-SXM-80GB", "A100-PCIe-40GB"]),
        ("8xH100-SXM-80G", UnknownName, ["H100-SXM-80GB"]),
        ("H100", InvalidInput, ["1xH100-SXM-80GB"]),
        ("0xH100", InvalidInput, ["1 to 576"]),
        ("-8xH100", InvalidInput, ["-8xH100"]),
        ("9999xH100", InvalidInput, ["9999"]),
        ("2x8x8xH100", InvalidInput, ["more than two counts"]),
        ("", InvalidInput, ["mapping"]),
        ("8x" * 10_000, InvalidInput, ["…"]),
        (8, InvalidInput, ["8"]),
        (None, InvalidInput, ["None"]),
        (["8xH100"], InvalidInput, ["mapping"]),
        ({}, InvalidInput, ["cluster.device"]),
        ({"device": "H100", "gpu_per_node": 8}, UnknownKey, ["cluster.gpu_per_node", "gpus_per_node"]),
        ({"device": "H100", "gpus_per_node": 0}, InvalidInput, ["cluster.gpus_per_node", "1 to 576"]),
        ({"device": "H100", "gpus_per_node": -8}, InvalidInput, ["cluster.gpus_per_node", "-8"]),
        ({"device": "H100", "gpus_per_node": 2.5}, InvalidInput, ["whole"]),
        ({"device": "H100", "gpus_per_node": True}, InvalidInput, ["True"]),
        ({"device": "H100", "nodes": 1e12}, InvalidInput, ["cluster.nodes"]),
        ({"device": "H100", "intra": "nvlink9"}, UnknownName, ["cluster.intra", "nvlink"]),
        ({"device": "H100", "inter": "0Gb/s"}, InvalidInput, ["cluster.inter", "positive"]),
        ({"device": "H100", "inter": 400}, InvalidInput, ["cluster.inter", "400Gb/s-IB"]),
        ({"device": "H100", "inter": {"gbps": 400}}, UnknownKey, ["cluster.inter.gbps", "bytes_per_s"]),
        ({"device": "H100", "host_memory": 0}, InvalidInput, ["cluster.host_memory"]),
        ({"device": "H100", "host_memory": "much"}, InvalidInput, ["cluster.host_memory", "much"]),
        ({"device": 80}, InvalidInput, ["cluster.device"]),
        ({"device": {}}, InvalidInput, ["cluster.device.memory"]),
        ({"device": {"memory": 80}}, InvalidInput, ["cluster.device.memory", "80GiB"]),
        ({"device": {"memory": "-80GiB"}}, InvalidInput, ["cluster.device.memory"]),
        ({"device": {"memroy": "80GiB"}}, UnknownKey, ["cluster.device.memroy", "did you mean memory?"]),
        ({"device": {"memory": "80GiB", "bf16_flops_per_s": 989}}, InvalidInput, ["989e12"]),
        ({"device": {"memory": "80GiB", "compute_capability": "ten"}}, InvalidInput, ["9.0"]),
        ({"device": {"memory": "80GiB", "name": "H100-SXM-80GB"}}, Contradiction, ["catalogue"]),
    ],
)
def test_a_wrong_cluster_gets_one_clear_error(spec: object, error: type[UllageError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        cluster(spec)  # type: ignore[arg-type]
    message = str(caught.value)
    assert type(caught.value) is error
    assert len(message) < 1000
    for word in words:
        assert word in message


def test_aliases_that_explode_do_not() -> None:
    bomb: list[object] = ["x"] * 10
    for _ in range(12):
        bomb = [bomb] * 10
    with pytest.raises(InvalidInput) as caught:
        cluster({"device": bomb})
    assert len(str(caught.value)) < 1000


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_keys = st.sampled_from(["device", "gpus_per_node", "nodes", "intra", "inter", "host_memory", "memory", "name"])


@given(spec=_json | st.dictionaries(_keys, _json | st.just("H100") | st.just({"memory": "80GiB"}), max_size=5))
def test_nothing_but_a_message_comes_of_nonsense(spec: object) -> None:
    try:
        found = cluster(spec)  # type: ignore[arg-type]
    except InvalidInput as error:
        assert str(error)  # noqa: PT017 - right or a message, never anything else
    else:
        assert found.gpus >= 1
