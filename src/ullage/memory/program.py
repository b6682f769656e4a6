"""A step of training as a program of allocations, whose peak is a fold.

A program is a tree: leaves allocate or free one Item, inner nodes run children in order or repeat a child. Each node knows
what it leaves behind (``delta_bytes``) and how high it rises above its start (``peak_bytes``), so a hundred equal layers cost
no more than one: this is the closed form. ``events`` writes the same tree out, allocation by allocation: the replay that the
closed form is held against, and what the allocator's simulation is fed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ullage.memory.scopes import OpenScopes

ALLOCATION_BYTES = 512
"""The caching allocator rounds every block up to this (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)."""


def round_up(n_bytes: int, to: int = ALLOCATION_BYTES) -> int:
    return -(-n_bytes // to) * to


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """One kind of allocation: a line of the ledger. Two Items are the same only if they are one object.

    bytes: of one allocation, rounded as the allocator rounds. formula: how they come about, in words and numbers.
    provenance: exact | measured | default. lives: from when to when. stream: the CUDA stream whose pool it comes from.
    pieces: sizes of the tensors that it is made of, where it is more than one (their sum is ``bytes``).
    """

    category: str
    what: str
    bytes: int
    formula: str = ""
    provenance: str = "exact"
    lives: str = ""
    stream: int = 0
    pieces: tuple[int, ...] = ()


class Node:
    """A part of a program. delta_bytes: live bytes at its end minus at its start; peak_bytes: highest rise, at least 0."""

    __slots__ = ("_net", "backwards", "changes", "delta_bytes", "forwards", "peak_bytes", "weights")
    delta_bytes: int
    peak_bytes: int
    forwards: int  # scopes inside: micro-batches' forwards, backwards (or their first halves), second halves
    backwards: int
    weights: int
    changes: int  # events when written out
    _net: dict[Item, int] | None


class Change(Node):
    """``count`` allocations of an item (frees where negative)."""

    __slots__ = ("count", "item")

    def __init__(self, item: Item, count: int = 1) -> None:
        self._net = None
        self.forwards = self.backwards = self.weights = 0
        self.changes = abs(count)
        self.item = item
        self.count = count
        self.delta_bytes = count * item.bytes
        self.peak_bytes = max(0, self.delta_bytes)


class Sequence(Node):
    """Children one after another; ``moment`` names what is happening, ``scope`` ties a backward to its forward."""

    __slots__ = ("children", "moment", "scope")

    def __init__(
        self, children: Iterable[Node], moment: str | None = None, scope: tuple[str, int] | None = None
    ) -> None:
        self._net = None
        self.children = tuple(children)
        self.moment = moment
        self.scope = scope  # the kind of pass that it is, and of which model chunk: memory/scopes.py
        delta = peak = self.changes = 0
        kind = scope[0] if scope is not None else ""
        self.forwards, self.backwards, self.weights = int(kind == "F"), int(kind in ("B", "I")), int(kind == "W")
        for child in self.children:
            self.changes += child.changes
            self.forwards += child.forwards
            self.backwards += child.backwards
            self.weights += child.weights
            if delta + child.peak_bytes > peak:
                peak = delta + child.peak_bytes
            delta += child.delta_bytes
        self.delta_bytes = delta
        self.peak_bytes = peak


class Repeat(Node):
    """``child`` run ``times`` times."""

    __slots__ = ("child", "times")

    def __init__(self, times: int, child: Node) -> None:
        assert times >= 0, times
        self._net = None
        self.forwards, self.backwards = times * child.forwards, times * child.backwards
        self.weights = times * child.weights
        self.changes = times * child.changes
        self.times = times
        self.child = child
        self.delta_bytes = times * child.delta_bytes
        last = max(0, (times - 1) * child.delta_bytes)
        self.peak_bytes = last + child.peak_bytes if times else 0


def alloc(item: Item, count: int = 1) -> Node:
    return Change(item, count)


def free(item: Item, count: int = 1) -> Node:
    return Change(item, -count)


EMPTY = Sequence(())


def on_stream(node: Node, stream: int) -> Node:
    """The same program with every allocation taken from another stream's pool; equal items stay one item."""
    moved: dict[Item, Item] = {}

    def copy(part: Node) -> Node:
        if isinstance(part, Change):
            if part.item not in moved:
                moved[part.item] = replace(part.item, stream=stream)
            return Change(moved[part.item], part.count)
        if isinstance(part, Repeat):
            return Repeat(part.times, copy(part.child))
        assert isinstance(part, Sequence)
        return Sequence([copy(child) for child in part.children], part.moment, part.scope)

    return copy(node)


class Peak(NamedTuple):
    """The highest point of a program: what is live there, and when (outermost moment first)."""

    bytes: int
    live: Counter[Item]
    moments: tuple[str, ...]
    micro_batch: int | None


def locate_peak(node: Node) -> Peak:
    """Where a program is highest (the first such point), and everything that is live there."""
    search = _Search()
    search.descend(node)
    live = Counter({item: count for item, count in search.live.items() if count})
    assert sum(item.bytes * count for item, count in live.items()) == node.peak_bytes
    return Peak(node.peak_bytes, live, tuple(search.moments), search.micro_batch)


class _Search:
    """Walks down to the peak and adds up what lies before it."""

    def __init__(self) -> None:
        self.live: Counter[Item] = Counter()
        self.moments: list[str] = []
        self.micro_batch: int | None = None
        self._passed = {"F": 0, "B": 0, "W": 0}

    def descend(self, node: Node) -> None:
        while not isinstance(node, Change):
            if isinstance(node, Repeat):
                if not node.times:
                    return
                self._pass(node.child, node.times - 1 if node.child.delta_bytes > 0 else 0)
                node = node.child
            else:
                assert isinstance(node, Sequence)
                if node.moment:
                    self.moments.append(node.moment)
                if node.scope is not None:
                    self.micro_batch = self._passed["B" if node.scope[0] == "I" else node.scope[0]] + 1
                if not node.peak_bytes:
                    return  # nothing in here rises above its start
                node = self._highest_child(node)
        if node.count > 0:
            self.live[node.item] += node.count

    def _highest_child(self, node: Sequence) -> Node:
        at = 0
        for child in node.children:
            if at + child.peak_bytes == node.peak_bytes:
                return child
            self._pass(child, 1)
            at += child.delta_bytes
        raise AssertionError("a sequence has no child at its peak")

    def _pass(self, node: Node, times: int) -> None:
        if times:
            _add(self.live, net(node), times)
            self._passed["F"] += times * node.forwards
            self._passed["B"] += times * node.backwards
            self._passed["W"] += times * node.weights


def _add(live: Counter[Item], changes: dict[Item, int], times: int) -> None:
    for item, count in changes.items():
        live[item] += count * times


def net(node: Node) -> dict[Item, int]:
    """What a program leaves live, by item (negative: what it freed of its surroundings)."""
    if node._net is None:
        total: dict[Item, int] = {}
        if isinstance(node, Change):
            total[node.item] = node.count
        elif isinstance(node, Repeat):
            total = {item: count * node.times for item, count in net(node.child).items() if node.times}
        else:
            assert isinstance(node, Sequence)
            for child in node.children:
                for item, count in net(child).items():
                    total[item] = total.get(item, 0) + count
            total = {item: count for item, count in total.items() if count}
        node._net = total
    return node._net


def is_closed(node: Node) -> bool:
    """Whether a program frees nothing but what it has allocated itself, and leaves nothing behind."""
    live: Counter[Item] = Counter()
    for change in _flat(node):
        if isinstance(change, Change):
            live[change.item] += change.count
            if live[change.item] < 0:
                return False
    return not any(live.values())


class Event(NamedTuple):
    """One allocation (``alive``) or free; ``handle`` ties the two."""

    handle: int
    item: Item
    alive: bool


def events(node: Node) -> Iterator[Event]:
    """The program written out. A free ends the youngest allocation of its item in its own micro-batch, else the youngest of all."""
    return map(Event._make, written_out(node))


def written_out(node: Node) -> Iterator[tuple[int, Item, bool]]:
    """``events`` as plain tuples, for the allocator's simulation."""
    shared: _Handles = defaultdict(list)
    opened: OpenScopes[_Handles] = OpenScopes(lambda: defaultdict(list))
    scope = shared
    handle = 0
    for change in _flat(node):
        if isinstance(change, tuple):
            kind, chunk = change
            scope = shared
            if not kind.startswith("end"):
                scope = opened.enter(kind, chunk)
            elif (closed := opened.leave(kind[-1], chunk)) is not None:  # what it leaves outlives its micro-batch
                for item, handles in closed.items():
                    shared[item].extend(handles)
            continue
        item = change.item
        for _ in range(change.count):
            scope[item].append(handle)
            yield handle, item, True
            handle += 1
        for _ in range(-change.count):
            handles = scope[item] or shared[item] or _elsewhere(item, opened)
            yield handles.pop(), item, False


def _elsewhere(item: Item, opened: OpenScopes[_Handles]) -> list[int]:
    for scope in opened:
        if scope[item]:
            return scope[item]
    raise AssertionError(f"{item.what} is freed and was never allocated")


_Handles = defaultdict[Item, list[int]]
_Mark = tuple[str, int]


def _flat(node: Node) -> list[Change | _Mark]:
    """The program's changes in order, with marks where a micro-batch begins and ends."""
    if isinstance(node, Change):
        return [node]
    if isinstance(node, Repeat):
        return _flat(node.child) * node.times
    assert isinstance(node, Sequence)
    inner = [change for child in node.children for change in _flat(child)]
    if node.scope is None:
        return inner
    kind, chunk = node.scope
    return [(kind, chunk), *inner, (f"end {kind}", chunk)]
