"""Gathers and reductions beside computing, against what can be written down."""

from ullage.timing.overlap import Wrapped, backward_s, forward_s


def test_gathers_hide_behind_computing() -> None:
    blocks = [Wrapped(compute_s=2.0, gather_s=1.0, reduce_s=0.5)] * 4
    assert forward_s(blocks) == 1.0 + 4 * 2.0  # the first is waited for
    assert backward_s(blocks) == 1.0 + 4 * 2.0 + 0.5  # and the last reduction


def test_gathers_that_take_longer_are_waited_for() -> None:
    blocks = [Wrapped(compute_s=1.0, gather_s=2.0)] * 4
    assert forward_s(blocks) == 4 * 2.0 + 1.0


def test_nothing_to_gather() -> None:
    blocks = [Wrapped(compute_s=1.0)] * 3
    assert forward_s(blocks) == backward_s(blocks) == 3.0
    assert backward_s([]) == 0.0
