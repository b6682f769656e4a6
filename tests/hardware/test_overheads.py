"""Context, communicators and workspaces against what was measured, source beside each number."""

from __future__ import annotations

import itertools

import pytest

from ullage.hardware import overheads
from ullage.hardware.catalogue import cluster, device, devices
from ullage.hardware.overheads import Overhead
from ullage.units import GIB, KIB, MIB


def every_overhead(name: str) -> list[Overhead]:
    gpu = device(name)
    groups = [(1, 1), (2, 1), (2, 2), (4, 1), (8, 1), (16, 2), (72, 1), (4096, 512)]
    return [
        overheads.context(gpu),
        overheads.context(gpu, lazy=False),
        overheads.first_collective(gpu),
        overheads.cublas_workspace_bytes(gpu),
        overheads.cublas_workspace_bytes(gpu, hopper_only=True),
        overheads.te_workspace_bytes(gpu),
        overheads.deterministic_attention_workspace_bytes(gpu, batch=1, heads=8, seq_q=4096, seq_kv=4096),
        *(overheads.communicator(gpu, size, nodes) for size, nodes in groups),
        *(overheads.point_to_point(gpu, near, far) for near, far in itertools.product((0, 1, 7), (0, 1, 56))),
    ]


@pytest.mark.parametrize("name", devices())
def test_every_overhead_lies_in_its_range_and_has_a_source(name: str) -> None:
    for overhead in every_overhead(name):
        assert 0 <= overhead.low_bytes <= overhead.bytes <= overhead.high_bytes, overhead
        assert overhead.source, overhead
        assert overhead.provenance in {"measured", "default", "exact"}, overhead
        assert overhead.high_bytes < 8 * GIB, overhead


@pytest.mark.parametrize(
    ("name", "lazy", "measured_bytes", "provenance"),
    [
        ("A100-SXM-80GB", True, 0.47 * GIB, "measured"),  # stas00/ml-engineering@744d01e, torch 2.1.1
        ("A100-SXM-80GB", False, 0.92 * GIB, "measured"),  # the same
        ("H100-SXM-80GB", True, 0.52 * GIB, "measured"),  # mlc-ai/pith-train@889a408
        ("RTX-6000-Ada-48GB", True, 426 * MIB, "measured"),  # unslothai/unsloth-zoo#1053
        ("V100-SXM-32GB", True, 1113 * MIB, "measured"),  # bigscience-workshop/bigscience
        ("B200-SXM-180GB", True, 0.45 * GIB, "default"),
        ("MI300X-192GB", True, 0.45 * GIB, "default"),
    ],
)
def test_context(name: str, lazy: bool, measured_bytes: float, provenance: str) -> None:
    found = overheads.context(device(name), lazy=lazy)
    assert found.bytes == pytest.approx(measured_bytes, abs=1)
    assert found.provenance == provenance


def test_the_world_group_of_32_h100_was_0_39_gib() -> None:
    # mlc-ai/pith-train@889a408: 4 nodes of 8
    found = overheads.communicator(device("H100-SXM-80GB"), 32, nodes_crossed=4)
    assert found.bytes == pytest.approx(0.39 * GIB, rel=0.02)


@pytest.mark.parametrize(
    ("name", "group_size", "measured_bytes"),
    [
        ("A100-SXM-80GB", 2, 544 * 10**6),  # NVIDIA/nccl#964, groups of two
        ("A100-SXM-80GB", 4, 688 * 10**6),  # NVIDIA/nccl#964
        ("A100-SXM-80GB", 2, 342 * MIB),  # ai-dynamo/aiconfigurator@095f58a, given for all GPU types
        ("A100-SXM-80GB", 8, 392 * MIB),
        ("H100-SXM-80GB", 8, 392 * MIB),
        ("L40S-48GB", 8, 392 * MIB),
        ("B200-SXM-180GB", 8, 392 * MIB),
    ],
)
def test_a_communicators_range_covers_what_was_measured(name: str, group_size: int, measured_bytes: int) -> None:
    found = overheads.communicator(device(name), group_size)
    assert found.low_bytes <= measured_bytes <= found.high_bytes


def test_the_first_collective_of_two_gpus_took_1_45_gib_and_left_1_28() -> None:
    # stas00/ml-engineering@744d01e training/performance/README.md
    gpu = device("A100-SXM-80GB")
    kept, buffers = overheads.first_collective(gpu), overheads.communicator(gpu, 2)
    assert kept.high_bytes == pytest.approx(1.28 * GIB, abs=1)
    assert kept.low_bytes + buffers.low_bytes <= 1.45 * GIB <= kept.high_bytes + buffers.high_bytes


def test_an_alltoall_of_8_h100_took_3_28_gb_more() -> None:
    # NVIDIA/nccl#1685: 1.06 -> 4.34 GB, ring and NVLink SHARP included
    gpu = device("H100-SXM-80GB")
    total = overheads.point_to_point(gpu, 7).bytes + overheads.communicator(gpu, 8).bytes
    assert total == pytest.approx(3.28e9, rel=0.02)


def test_nvlink_sharp_buffers() -> None:
    # NVIDIA/nccl@5067397 src/transport/nvls.cc: Hopper 256 MiB for eight GPUs; Blackwell 384 MiB in a node, 512 across
    for name, size, nodes, nvls_bytes in (
        ("H100-SXM-80GB", 8, 1, 256 * MIB),
        ("B200-SXM-180GB", 8, 1, 384 * MIB),
        ("B200-SXM-180GB", 16, 2, 512 * MIB),
        ("H100-SXM-80GB", 2, 1, 0),
        ("A100-SXM-80GB", 8, 1, 0),
        ("H100-PCIe-80GB", 8, 1, 0),
    ):
        found = overheads.communicator(device(name), size, nodes)
        assert found.bytes - found.low_bytes == nvls_bytes, (name, size)


def test_a_group_of_one_takes_nothing() -> None:
    assert overheads.communicator(device("H100"), 1).high_bytes == 0
    assert overheads.point_to_point(device("H100"), 0).high_bytes == 0


@pytest.mark.parametrize(
    ("name", "cublas_bytes", "te_bytes"),
    [
        # pytorch/pytorch CUDABlas.cpp; NVIDIA/TransformerEngine@d0067d0 cpp_extensions/gemm.py
        ("A100-SXM-80GB", 8_519_680, 4 * MIB),
        ("RTX-4090-24GB", 8_519_680, 4 * MIB),
        ("H100-SXM-80GB", 32 * MIB, 32 * MIB + KIB),
        ("B200-SXM-180GB", 32 * MIB, 32 * MIB + KIB),
        ("RTX-5090-32GB", 32 * MIB, 32 * MIB + KIB),
    ],
)
def test_gemm_workspaces(name: str, cublas_bytes: int, te_bytes: int) -> None:
    gpu = device(name)
    assert overheads.cublas_workspace_bytes(gpu).bytes == cublas_bytes
    assert overheads.te_workspace_bytes(gpu).bytes == te_bytes
    assert overheads.te_workspace_bytes(gpu, streams=4).bytes == 4 * te_bytes


def test_torch_from_before_blackwell_knows_hopper_only() -> None:
    assert overheads.cublas_workspace_bytes(device("B200"), hopper_only=True).bytes == 8_519_680
    assert overheads.cublas_workspace_bytes(device("H100"), hopper_only=True).bytes == 32 * MIB


def test_amd_workspaces() -> None:
    assert overheads.cublas_workspace_bytes(device("MI300X")).bytes == 128 * MIB
    assert overheads.cublas_workspace_bytes(device("MI210")).bytes == 32 * MIB


def test_a_device_of_unknown_capability_may_have_either_workspace() -> None:
    gpu = cluster({"device": {"memory": "80GiB"}}).device
    found = overheads.cublas_workspace_bytes(gpu)
    assert (found.bytes, found.high_bytes, found.provenance) == (8_519_680, 32 * MIB, "default")


def test_deterministic_attention_is_quadratic_up_to_its_cap() -> None:
    def size(name: str, seq: int) -> int:
        gpu = device(name)
        found = overheads.deterministic_attention_workspace_bytes(gpu, batch=1, heads=8, seq_q=seq, seq_kv=seq)
        return found.bytes

    assert size("H100", 1024) == 8 * 1024 * 1024 * 2
    assert size("H100", 65536) == 256 * MIB
    assert size("A100-80GB", 65536) == 0
