"""Zero bubble on one chunk per rank: the weights' gradients fill the time in which a stage would wait.

Source: Qi et al., arXiv 2401.10241, section 2: ZB-H1 holds as many micro-batches as 1F1B, ZB-H2 nearly twice as many and has no bubble.
ZB-H1 is torch's ScheduleInterleavedZeroBubble of one stage per rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.schedule.base import Action, Shape


def zb_h1(shape: Shape, rank: int) -> Iterator[Action]:
    """In flight until their weights' gradients are made: p on every rank. A rank leaves its first ``rank`` of these for later."""
    return _filled(shape, ahead=shape.stages - 1 - rank, left=rank)


def zb_h2(shape: Shape, rank: int) -> Iterator[Action]:
    """In flight until their weights' gradients are made: 2p - 1 on every rank."""
    return _filled(shape, ahead=2 * (shape.stages - 1 - rank), left=2 * rank)


def _filled(shape: Shape, *, ahead: int, left: int) -> Iterator[Action]:
    """ahead: forwards before the first pair of a forward and a backward. left: backwards before the first gradients of weights."""
    shape.must_have(1, "the zero-bubble schedule")
    count = shape.micro_batches
    for forward in range(min(ahead, count)):
        yield Action("F", 0, forward)
    for backward in range(count):
        if backward + ahead < count:
            yield Action("F", 0, backward + ahead)
        yield Action("I", 0, backward)
        if backward >= left:
            yield Action("W", 0, backward - left)
    for weights in range(max(0, count - left), count):
        yield Action("W", 0, weights)
