"""Bytes on the wire, exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.comm.volume import factor, hierarchical_bytes, once_each, sent_bytes
from ullage.hardware.curve import Kind

KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_reduce", 8, 2 * 800 * 7 // 8),
        ("all_gather", 8, 700),
        ("reduce_scatter", 8, 700),
        ("all_to_all", 8, 700),
        ("broadcast", 8, 800),
        ("send", 2, 800),
    ],
)
def test_a_ring_sends(kind: Kind, ranks: int, expected: int) -> None:
    assert sent_bytes(kind, 800, ranks) == expected


def test_a_tree_of_two_sends_the_payload_once() -> None:
    assert sent_bytes("all_reduce", 800, 2, "tree") == 800
    assert sent_bytes("all_reduce", 800, 16, "tree") == 1600


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), payload=st.integers(0, 2**50))
def test_a_group_of_one_sends_nothing(kind: Kind, payload: int) -> None:
    assert sent_bytes(kind, payload, 1) == 0


@settings(deadline=None)
@given(payload=st.integers(1, 2**40), ranks=st.integers(2, 4096))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(payload: int, ranks: int) -> None:
    parts = sent_bytes("reduce_scatter", payload, ranks) + sent_bytes("all_gather", payload, ranks)
    assert sent_bytes("all_reduce", payload, ranks) == parts


@settings(deadline=None)
@given(
    kind=st.sampled_from(("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
    payload=st.integers(1, 2**40),
    inside=st.integers(1, 72),
    domains=st.integers(1, 512),
)
def test_a_hierarchy_sends_what_the_ring_sends(kind: Kind, payload: int, inside: int, domains: int) -> None:
    near, far = hierarchical_bytes(kind, payload, inside, domains)
    assert near + far == sent_bytes(kind, payload, inside * domains)
    assert far == 0 if domains == 1 else far > 0
    assert near == 0 if inside == 1 else near > 0


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), ranks=st.integers(1, 4096))
def test_more_ranks_never_send_less(kind: Kind, ranks: int) -> None:
    assert factor(kind, ranks) <= factor(kind, ranks + 1) <= Fraction(2)


def test_a_token_goes_once_to_each_place() -> None:
    assert once_each(1, 8) == pytest.approx(1)
    assert once_each(8, 1) == pytest.approx(1 / 8)
    assert once_each(2, 2) == pytest.approx(3 / 4)  # half of all pairs are of one place
    assert 4 * once_each(8, 4) == pytest.approx(4 * 4 * (1 - (3 / 4) ** 8) / 8)
    assert once_each(8, 10**6) == pytest.approx(1, rel=1e-5)
