"""The best split against every split."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from ullage.planner.splits import best_split, least_slowest_s


def splits(count: int, stages: int, least: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (count,)
        return
    for first in range(least, count - least * (stages - 1) + 1):
        for rest in splits(count - first, stages - 1, least):
            yield (first, *rest)


def slowest(layers_s: Sequence[float], split: tuple[int, ...], first_s: float, last_s: float) -> float:
    found, start = [], 0
    for size in split:
        found.append(sum(layers_s[start : start + size]))
        start += size
    found[0] += first_s
    found[-1] += last_s
    return max(found)


@pytest.mark.parametrize("seed", range(150))
def test_no_split_has_a_faster_slowest_stage(seed: int) -> None:
    rng = random.Random(seed)
    stages, least = rng.randint(1, 5), rng.randint(1, 2)
    count = rng.randint(stages * least, 11)
    equal = rng.random() < 0.5
    layers_s = [rng.choice([1.0, 0.7])] * count if equal else [rng.choice([0.5, 1.0, 3.0]) for _ in range(count)]
    first_s, last_s = rng.choice([0.0, 0.2, 1.5, 5.0]), rng.choice([0.0, 0.4, 2.0, 7.0])
    split = best_split(layers_s, stages, first_s=first_s, last_s=last_s, least=least)
    assert sum(split) == count
    assert len(split) == stages
    assert min(split) >= least
    best = min(slowest(layers_s, one, first_s, last_s) for one in splits(count, stages, least))
    assert slowest(layers_s, split, first_s, last_s) == pytest.approx(best, rel=1e-9)
    if equal:
        assert least_slowest_s(layers_s[0], count, stages, first_s, last_s, least) == pytest.approx(best, rel=1e-9)
