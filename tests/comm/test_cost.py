"""Invariants of what a collective costs, on every node type of the catalogue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.calibration.collectives import curve
from ullage.comm.cost import seconds
from ullage.comm.group import Group, axis_group
from ullage.comm.volume import once_each
from ullage.hardware.catalogue import cluster, node_types
from ullage.hardware.curve import Kind
from ullage.units import GIB, GIGA, MIB

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
CLUSTERS = (
    "4xdgx-h100",
    "16xdgx-a100",
    "2xgb200-nvl72",
    "8xaws-p4d",
    "2xa100-pcie-8x",
    "4xmi300x-8x400g",
    "16xaws-p6-b200",
)
kinds = st.sampled_from(KINDS)
clusters = st.sampled_from(CLUSTERS).map(cluster)
exponents = st.integers(0, 9)


@pytest.mark.parametrize("name", node_types())
def test_every_node_type_has_a_curve(name: str) -> None:
    machine = cluster(f"2x{name}")
    for kind in KINDS:
        for size in (2, 3, machine.gpus):
            cost = seconds(kind, 64 * MIB, axis_group(machine, 1, size), curve(machine))
            assert 0 < cost.seconds < 10, (kind, size, cost)
            assert cost.provenance in {"measured", "default"}


@settings(deadline=None)
@given(machine=clusters, kind=kinds, payload=st.integers(0, 2**40), stride=st.integers(1, 64))
def test_a_group_of_one_is_free(machine: object, kind: Kind, payload: int, stride: int) -> None:
    free = seconds(kind, payload, axis_group(machine, stride, 1), curve(machine))  # type: ignore[arg-type]
    assert (free.seconds, free.provenance, free.link) == (0.0, "exact", "")


@settings(max_examples=300, deadline=None)
@given(
    kind=kinds,
    name=st.sampled_from(CLUSTERS),
    size=exponents,
    payload=st.integers(1, 2**36),
    more=st.integers(1, 2**36),
)
def test_more_bytes_are_never_faster(kind: Kind, name: str, size: int, payload: int, more: int) -> None:
    machine = cluster(name)
    group = axis_group(machine, 1, min(2**size, machine.gpus))
    links = curve(machine)
    assert seconds(kind, payload, group, links).seconds <= seconds(kind, payload + more, group, links).seconds * (
        1 + 1e-12
    )


@settings(deadline=None)
@given(kind=kinds, size=st.integers(2, 8), payload=st.integers(20, 34).map(lambda power: 2**power))
def test_leaving_the_domain_is_never_faster(kind: Kind, size: int, payload: int) -> None:
    machine = cluster("8xdgx-h100")
    inside, across = axis_group(machine, 1, size), axis_group(machine, 8, size)
    links = curve(machine)
    assert seconds(kind, payload, inside, links).seconds < seconds(kind, payload, across, links).seconds


@pytest.mark.parametrize(
    ("name", "stride", "size", "group"),
    [
        ("4xdgx-h100", 1, 8, Group(ranks=8, domain_ranks=8, nic_groups=1)),
        ("4xdgx-h100", 1, 32, Group(ranks=32, domain_ranks=8, nic_groups=1)),
        ("4xdgx-h100", 8, 4, Group(ranks=4, domain_ranks=1, nic_groups=8)),  # data parallel beside tensor parallel 8
        ("4xdgx-h100", 2, 16, Group(ranks=16, domain_ranks=4, nic_groups=2)),
        ("4xdgx-h100", 2, 4, Group(ranks=4, domain_ranks=4, nic_groups=2)),
        ("18xgb200-nvl72", 1, 64, Group(ranks=64, domain_ranks=64, nic_groups=1)),
        ("36xgb200-nvl72", 1, 144, Group(ranks=144, domain_ranks=72, nic_groups=1)),
    ],
)
def test_the_groups_of_an_axis(name: str, stride: int, size: int, group: Group) -> None:
    assert axis_group(cluster(name), stride, size) == group


def test_ranks_of_one_node_share_its_nics() -> None:
    """Eight rings of one GPU per node move eight payloads in the time in which one ring of all GPUs moves one of eight."""
    machine = cluster("4xdgx-h100")
    alone = seconds("all_gather", 8 * GIB, axis_group(machine, 8, 4), curve(machine))
    nic = machine.inter.bytes_per_s
    assert nic is not None
    assert 8 * GIB * 3 / 4 / alone.seconds == pytest.approx(0.94 * nic, rel=0.01)
    assert alone.link == "InfiniBand NDR"


def test_nvlink_sharp_lifts_an_all_reduce_above_the_ring() -> None:
    machine = cluster("dgx-h200")
    took = seconds("all_reduce", 8 * GIB, axis_group(machine, 1, 8), curve(machine)).seconds
    assert 8 * GIB * 2 * 7 / 8 / took > 450 * GIGA


def test_a_token_crosses_to_a_node_once() -> None:
    """Of 32 ranks on 4 nodes and 8 experts a token: 3.6 nodes want it where 8 copies would go."""
    machine = cluster("4xdgx-h100")
    group, links = axis_group(machine, 1, 32), curve(machine)
    rows = GIB
    each = seconds("all_to_all", rows, group, links)
    once = seconds("all_to_all", round(rows * once_each(8, 32)), group, links, 8)
    start = links.all_to_all_start_s
    assert (once.seconds - start) / (each.seconds - start) == pytest.approx(4 * (1 - (3 / 4) ** 8) / 8, rel=1e-6)
