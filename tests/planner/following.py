"""Random strategies of a space, each followed through a search's looks, from the first bound to the exact time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ullage.planner.search import Search
from ullage.planner.strategies import Strategy, Value
from ullage.planner.wanted import bases, wanted


@dataclass
class Followed:
    """bounds_s: of each look, in order; the last is the exact one. at: its recomputation's place in the family."""

    strategy: Strategy
    at: int
    bounds_s: list[float]


class Following(Search):
    """A search whose queue a test takes from at random. first_that_may_fit: leave out what a bound of memory leaves out."""

    pushed: list
    chosen: tuple[Strategy, int] | None = None
    rng: random.Random

    def _push(self, value: Value, look) -> None:
        self.pushed.append((value[0], look))

    def _fitted(self, strategy: Strategy, value: Value) -> None:
        first = self._first_that_may_fit(strategy)
        if first < len(strategy.family.kinds):
            at = self.rng.randrange(first, len(strategy.family.kinds))
            self._push(self._bound(strategy, at), lambda bound: self._timed(strategy, at, bound))

    def _timed(self, strategy: Strategy, at: int, value: Value) -> None:
        self.chosen = strategy, at
        super()._timed(strategy, at, value)


def following(doc: dict, engine: str, *, seed: int, exhaustive: bool) -> Following:
    want = wanted({"schema": 1, **doc}, (), (engine,))
    found, refused = bases(want)
    assert found, refused
    search = Following(want=want, bases=found, goal=lambda _, seconds: (seconds,), exhaustive=exhaustive)
    search.rng = random.Random(seed)
    search.pushed = []
    return search


def followed(search: Following, many: int) -> Iterator[Followed]:
    """Strategies that can be timed."""
    base, rng = search.bases[0], search.rng
    grids = [some for some in search._grids(base) if next(some.costs(), None)]
    for _ in range(20 * many):
        search.pushed, search.chosen = [], None
        search._price(base, rng.choice(grids))
        bounds: list[float] = []
        while search.pushed and search.chosen is None:
            value, look = rng.choice(search.pushed)
            search.pushed = []
            bounds.append(value)
            look((value,))
        if search.chosen is None or not search.pushed:
            continue
        bounds.append(search.pushed[0][0])
        yield Followed(strategy=search.chosen[0], at=search.chosen[1], bounds_s=bounds)
        many -= 1
        if not many:
            return
