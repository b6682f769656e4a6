"""Layers over pipeline stages, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf


def best_split(
    layers_s: Sequence[float], stages: int, *, first_s: float = 0.0, last_s: float = 0.0, least: int = 1
) -> tuple[int, ...]:
    """How many layers, at least ``least``, each of ``stages`` takes, by dynamic programming over the places of the cuts.

    layers_s: seconds of each layer, in model order. first_s, last_s: what the first and the last stage do beside their layers
    (embedding, head and loss). No other cut has a faster slowest stage.
    """
    count = len(layers_s)
    assert 1 <= stages * least <= count, (stages, least, count)
    if len(set(layers_s)) == 1:
        return _equal_layers(layers_s[0], count, stages, first_s, last_s, least)
    before = [0.0, *accumulate(layers_s)]
    # slowest[i]: of the stages so far, holding the first i layers; cut[s][i]: where stage s then starts
    slowest = [
        first_s + own + (last_s if stages == 1 else 0.0) if stop >= least else inf for stop, own in enumerate(before)
    ]
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        left = stages - 1 - stage  # stages after it, each of which needs layers too
        slowest, cut = _with_stage(before, slowest, stage * least, count - left * least, least, 0.0 if left else last_s)
        cuts.append(cut)
    sizes, stop = [], count
    for cut in reversed(cuts):
        sizes.append(stop - cut[stop])
        stop = cut[stop]
    return (stop, *reversed(sizes))


def _with_stage(
    before: Sequence[float], slowest: Sequence[float], start: int, most: int, least: int, end_s: float
) -> tuple[list[float], list[int]]:
    """One stage more: of each number of layers up to ``most`` the slowest stage, and where the new one starts, at ``start`` or later.

    before: seconds of the layers before each. end_s: what the stage does beside its layers.
    """
    found, cut = [inf] * len(before), [0] * len(before)
    for stop in range(start + least, most + 1):
        until = before[stop] + end_s
        now = max(slowest[start], until - before[start])
        # the best start never moves back as the stop moves on: what stands before it only grows
        while start + least < stop:
            own, others = until - before[start + 1], slowest[start + 1]
            moved = own if own > others else others
            if moved >= now:
                break
            start, now = start + 1, moved
        found[stop], cut[stop] = now, start
    return found, cut


def _equal_layers(
    layer_s: float, count: int, stages: int, first_s: float, last_s: float, least: int
) -> tuple[int, ...]:
    """The same where every layer takes ``layer_s``: the slowest stage takes a whole number of layers and perhaps what an end does."""
    slowest = least_slowest_s(layer_s, count, stages, first_s, last_s, least)
    extra = [0.0] * stages
    extra[0] += first_s
    extra[-1] += last_s
    room = [max(least, int((slowest - own) / layer_s + _ROUNDING)) for own in extra]
    sizes = [least] * stages
    left = count - stages * least
    for stage in sorted(range(stages), key=lambda one: (extra[one], -one)):  # the ends last, then the early ones
        taken = min(left, room[stage] - least)
        sizes[stage] += taken
        left -= taken
    sizes[-1] += left
    return _levelled(sizes, room)


def _levelled(sizes: list[int], room: list[int]) -> tuple[int, ...]:
    """The same slowest stage with the others as equal as can be: what one lacks, a fuller one before it gives."""
    inner = range(1, len(sizes) - 1)
    total = sum(sizes[stage] for stage in inner)
    if inner and all(room[stage] == room[1] for stage in inner):
        each, more = divmod(total, len(inner))
        for place, stage in enumerate(inner):
            sizes[stage] = each + (place >= len(inner) - more)
    return tuple(sizes)


_ROUNDING = 1e-9


def least_slowest_s(layer_s: float, count: int, stages: int, first_s: float, last_s: float, least: int = 1) -> float:
    """The least seconds of the slowest of ``stages`` that share ``count`` equal layers, at least ``least`` each."""
    if stages == 1:
        return first_s + count * layer_s + last_s
    low = max((first_s + count * layer_s + last_s) / stages, least * layer_s + max(first_s, last_s))
    whole = int(low / layer_s)
    candidates = [
        low,
        *(own + layer_s * number for own in (0.0, first_s, last_s) for number in range(least, whole + 3)),
    ]
    for seconds in sorted(one for one in candidates if one >= low):
        ends = int((seconds - first_s) / layer_s + _ROUNDING) + int((seconds - last_s) / layer_s + _ROUNDING)
        if ends + (stages - 2) * int(seconds / layer_s + _ROUNDING) >= count:
            return seconds
    raise AssertionError((layer_s, count, stages, first_s, last_s))
