"""Collectives against published runs that the curves were not made from; bus bandwidth in GB/s as nccl-tests defines it.

Inside a node the curves are aiconfigurator's; these runs are other people's, on other boxes and releases of NCCL. Between nodes NCCL's
constants stand as NVIDIA wrote them; EFA's step was taken from the 2x p5 row, EFA v1's from 2x p4de, TCPXO's from 2x a3-mega, and
Omni-Path's share from 16 nodes of V100.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest

from ullage.calibration.collectives import curve
from ullage.comm.cost import seconds
from ullage.comm.group import axis_group
from ullage.comm.volume import factor
from ullage.hardware.catalogue import cluster
from ullage.hardware.cluster import Cluster, Link
from ullage.hardware.curve import Kind
from ullage.units import GIB, GIGA, KIB, MIB

STAS = "stas00/ml-engineering@744d01e network/README.md"
AWS = "aws-samples/awsome-distributed-training@7217859 micro-benchmarks/nccl-tests"


def bus(machine: Cluster, kind: Kind, ranks: int, payload: int) -> float:
    took = seconds(kind, payload, axis_group(machine, 1, ranks), curve(machine)).seconds
    return payload * float(factor(kind, ranks)) / took / GIGA


# (cluster, collective, source, bound on the relative error, payload -> measured)
ONE_NODE = [
    # nccl-tests -n 50; below 256 MiB its times are up to 2.6 times aiconfigurator's on the same fabric (NCCL's release is not said).
    (
        "8xA100-SXM-80GB",
        "all_reduce",
        STAS,
        0.12,
        {256 * MIB: 194.07, 512 * MIB: 222.72, GIB: 229.04, 4 * GIB: 233.88, 16 * GIB: 234.89},
    ),
    # all_reduce_bench.py starts each collective from Python: below 64 MiB that is what it times.
    (
        "8xH200-SXM-141GB",
        "all_reduce",
        STAS,
        0.07,
        {64 * MIB: 346.51, 256 * MIB: 436.15, GIB: 463.58, 4 * GIB: 473.10, 16 * GIB: 482.26},
    ),
    ("8xH200-SXM-141GB", "all_gather", STAS, 0.05, {16 * GIB: 361.4}),
    ("8xH200-SXM-141GB", "reduce_scatter", STAS, 0.05, {16 * GIB: 362.9}),
    # From 8 GiB on the box reached 840: another algorithm of NCCL's, which a table that ends at 512 MiB has not seen.
    (
        "8xB200-SXM-180GB",
        "all_reduce",
        STAS,
        0.12,
        {64 * MIB: 400.6, 256 * MIB: 646.11, GIB: 723.34, 4 * GIB: 740.64, 16 * GIB: 845.67},
    ),
    (
        "8xH100-SXM-80GB",
        "all_reduce",
        f"{AWS}/aws-batch/README.md",
        0.13,
        {
            MIB: 64.24,
            4 * MIB: 132.41,
            16 * MIB: 236.82,
            64 * MIB: 359.54,
            256 * MIB: 418.91,
            GIB: 441.81,
            4 * GIB: 475.97,
            16 * GIB: 483.05,
        },
    ),
    ("4xH100-SXM-80GB", "all_reduce", "public index file id 43466784132", 0.10, {GIB: 355.9, 16 * GIB: 367.0}),
]


@pytest.mark.parametrize(("name", "kind", "source", "bound", "measured"), ONE_NODE)
def test_one_node(name: str, kind: Kind, source: str, bound: float, measured: dict[int, float]) -> None:
    machine = cluster(name)
    for payload, rate in measured.items():
        assert bus(machine, kind, machine.gpus, payload) == pytest.approx(rate, rel=bound), (payload, source)


@pytest.mark.parametrize(("ranks", "rate"), [(4, 363.3), (5, 414.2), (6, 435.6), (7, 460.0), (8, 473.1)])
def test_an_all_reduce_by_gpus(ranks: int, rate: float) -> None:
    """8 GiB on an H200 node (stas00): the more GPUs, the more NVLink SHARP lifts the bus rate above the ring's 365."""
    assert bus(cluster("8xH200-SXM-141GB"), "all_reduce", ranks, 8 * GIB) == pytest.approx(rate, rel=0.07)


def test_pcie_only_boxes() -> None:
    """8x A100 over PCIe 4.0 (SimuMax): 12.5 GB/s; scaled from a box with PCIe 5.0. Its pairs share a switch, which nothing here knows."""
    machine = cluster("a100-pcie-8x")
    assert bus(machine, "all_reduce", 8, GIB) == pytest.approx(12.5, rel=0.1)
    assert bus(machine, "all_gather", 8, GIB) == pytest.approx(13.5, rel=0.2)
    assert curve(machine).intra_provenance == "default"


# Those whose fabric's step was not taken from them stand first.
HELD_OUT = [
    (
        "4xaws-p6-b200",
        "all_reduce",
        STAS,
        0.20,
        {16 * MIB: 64.43, 64 * MIB: 156.74, 256 * MIB: 229.09, GIB: 361.99, 4 * GIB: 377.34, 16 * GIB: 381.80},
    ),
    ("4xaws-p5en", "all_reduce", STAS, 0.10, {4 * GIB: 364.87}),
    ("16xaws-p5en", "all_reduce", f"{AWS}/slurm/topology-aware-nccl-tests/README.md", 0.10, {16 * GIB: 369.86}),
]
CALIBRATED = [
    (
        "2xaws-p5",
        "all_reduce",
        f"{AWS}/README.md",
        0.40,
        {
            MIB: 15.95,
            4 * MIB: 46.64,
            16 * MIB: 105.52,
            64 * MIB: 209.19,
            256 * MIB: 342.81,
            GIB: 436.95,
            4 * GIB: 465.87,
            16 * GIB: 487.09,
        },
    ),
    (
        "2xaws-p4de",
        "all_reduce",
        f"{AWS}/README.md",
        0.20,
        {MIB: 6.35, 4 * MIB: 14.73, 16 * MIB: 26.39, 64 * MIB: 47.58, 256 * MIB: 69.89, GIB: 76.79, 2 * GIB: 78.33},
    ),
    (
        "2xgcp-a3-mega",
        "all_gather",
        "dstackai/dstack@30a0dd5 examples/clusters/a3mega/README.md",
        0.06,
        {8 * MIB: 47.19, 16 * MIB: 76.89, 64 * MIB: 140.62, 256 * MIB: 165.34, GIB: 181.94, 8 * GIB: 188.54},
    ),
    (
        "16xjean-zay-v100",
        "all_reduce",
        "bigscience-workshop/bigscience@9e64ede experiments/bandwidth/n16_32gb_all_reduce_bench.txt",
        0.05,
        {4_000_000_000: 6.87},
    ),
    (
        "4xjean-zay-a100",
        "all_reduce",
        "bigscience-workshop/bigscience@9e64ede experiments/bandwidth/all_reduce_bench-a100-n4.txt",
        0.40,
        {4_000_000_000: 5.07},
    ),
]


@pytest.mark.parametrize(("name", "kind", "source", "bound", "measured"), HELD_OUT + CALIBRATED)
def test_between_nodes(name: str, kind: Kind, source: str, bound: float, measured: dict[int, float]) -> None:
    machine = cluster(name)
    for payload, rate in measured.items():
        assert bus(machine, kind, machine.gpus, payload) == pytest.approx(rate, rel=bound), (payload, source)


def test_a_fabric_that_nobody_named() -> None:
    """2x a3-ultragpu-8g, 400 Gb/s per GPU over RoCE (skypilot-org/skypilot@088eebc examples/gcp_gpu_direct_tcpx/README.md)."""
    measured = {16 * MIB: 135.41, 64 * MIB: 226.19, 256 * MIB: 284.21, GIB: 322.23, 8 * GIB: 325.72}
    machine = replace(cluster("2xdgx-h200"), inter=Link(name="RoCE", bytes_per_s=50e9))
    for payload, rate in measured.items():
        assert bus(machine, "all_gather", 16, payload) == pytest.approx(rate, rel=0.20), payload
    assert curve(machine).inter_provenance == "default"


# aliyun/SimAI@cef83f9 astra-sim-alibabacloud/inputs/ratio/nic_ratio.csv: the share of 8 x 48.5 GB/s that a ring reaches, by payload, on
# 2, 4, 8, 16, 32, 64 and 128 nodes of 8 GPUs.
NODES = (2, 4, 8, 16, 32, 64, 128)
SIMAI = {
    256 * MIB: (0.85, 0.77, 0.69, 0.57, 0.387, 0.209, 0.103),
    GIB: (0.92, 0.93, 0.90, 0.76, 0.74, 0.563, 0.315),
    4 * GIB: (0.95, 0.95, 0.95, 0.95, 0.923, 0.755, 0.74),
    16 * GIB: (0.96, 0.96, 0.96, 0.96, 0.957, 0.958, 0.919),
}


def test_rings_over_many_nodes() -> None:
    """A ring's all-reduce is a reduce-scatter and an all-gather, and NCCL has no other algorithm than the ring for those."""
    errors = []
    for payload, shares in SIMAI.items():
        for nodes, share in zip(NODES, shares, strict=True):
            machine = cluster(f"{nodes}xdgx-h100")
            group, links = axis_group(machine, 1, machine.gpus), curve(machine)
            took = (
                seconds("reduce_scatter", payload, group, links).seconds
                + seconds("all_gather", payload, group, links).seconds
            )
            measured = payload * float(factor("all_reduce", machine.gpus)) / (8 * 48.5 * GIGA * share)
            errors.append(math.log(took / measured))
    assert median(abs(error) for error in errors) < 0.10
    assert abs(median(errors)) < 0.08
    assert max(abs(error) for error in errors) < 0.45


def test_small_collectives_inside_a_node() -> None:
    """1 KiB among 8 GPUs: what a latency is (aiconfigurator's tables, microseconds)."""
    for name, us in (("8xA100-SXM-80GB", 21.8), ("8xH100-SXM-80GB", 15.6), ("8xB200-SXM-180GB", 25.2)):
        machine = cluster(name)
        took = seconds("all_reduce", KIB, axis_group(machine, 1, 8), curve(machine)).seconds
        assert took * 1e6 == pytest.approx(us, rel=0.05)
