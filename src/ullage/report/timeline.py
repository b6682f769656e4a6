"""A step as a sequence of events: one neutral record, from an account's program or from a trace, that every picture is drawn from.

An account knows in which order things happen, not when: its clock counts allocations and frees, and a moment that allocates
nothing takes one tick, so that it can be seen. A trace has a clock of its own and sets ``timed``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ullage.frozen import frozen
from ullage.memory.program import Change, Item, Node, Repeat, Sequence, events


class TimelineEvent(NamedTuple):
    """One allocation (``alive``) or free. ``handle`` ties the two, which agree in all but time, moment and alive.

    bytes: as allocated. moment: what is happening, in words. detail: how the bytes come about (a formula, a shape).
    """

    time: int
    handle: int
    bytes: int
    alive: bool
    category: str
    what: str
    moment: str
    stream: int = 0
    detail: str = ""


class Span(NamedTuple):
    """A moment from ``start`` up to ``end``; spans of one depth do not overlap and lie inside one of the depth above."""

    name: str
    start: int
    end: int
    depth: int


@frozen
class Timeline:
    """events and spans by time; ``end`` is the clock's last reading. timed: the clock counts microseconds."""

    events: tuple[TimelineEvent, ...]
    spans: tuple[Span, ...] = ()
    end: int
    timed: bool = False


class Limit(NamedTuple):
    """A level that memory is held against, in words."""

    bytes: int
    what: str


class Held(NamedTuple):
    """What is live at one time, equal allocations together."""

    category: str
    what: str
    detail: str
    bytes: int


@frozen
class Top:
    """The highest point of a timeline (the first such): its time, moment, and all that is live there, the largest first."""

    time: int
    bytes: int
    moment: str
    held: tuple[Held, ...]


def top(timeline: Timeline) -> Top:
    """Where a timeline is highest."""
    live = best = 0
    found: TimelineEvent | None = None
    for event in timeline.events:
        live += event.bytes if event.alive else -event.bytes
        if live > best:
            best, found = live, event
    if found is None:
        return Top(time=0, bytes=0, moment="", held=())
    sizes: dict[tuple[str, str, str], int] = {}
    for event in timeline.events:
        key = (event.category, event.what, event.detail)
        sizes[key] = sizes.get(key, 0) + (event.bytes if event.alive else -event.bytes)
        if event is found:
            break
    held = [Held(*key, size) for key, size in sizes.items() if size]
    held.sort(key=lambda one: (-one.bytes, one.category, one.what))
    return Top(time=found.time, bytes=best, moment=found.moment, held=tuple(held))


class Sample(NamedTuple):
    """Live bytes by category from ``time`` on, after everything that happens then."""

    time: int
    moment: str
    bytes: int
    by_category: dict[str, int]


def samples(timeline: Timeline, most: int) -> list[Sample]:
    """At most about ``most`` samples: of each of many equal parts the highest and the lowest, so that no peak is lost."""
    wanted = _wanted(_totals(timeline.events), most)
    found: list[Sample] = []
    live: dict[str, int] = {}
    index = -1
    for index, last in enumerate(_ends_of_times(timeline.events, live)):
        if index in wanted:
            sizes = {category: size for category, size in live.items() if size}
            found.append(Sample(last.time, last.moment, sum(sizes.values()), sizes))
    return found


def _ends_of_times(happened: Iterable[TimelineEvent], live: dict[str, int]) -> Iterator[TimelineEvent]:
    """The last event of each time, with ``live`` as it then stands."""
    before: TimelineEvent | None = None
    for event in happened:
        if before is not None and event.time != before.time:
            yield before
        live[event.category] = live.get(event.category, 0) + (event.bytes if event.alive else -event.bytes)
        before = event
    if before is not None:
        yield before


def _totals(happened: Iterable[TimelineEvent]) -> list[int]:
    """Live bytes after each time at which something happens."""
    live: dict[str, int] = {}
    return [sum(live.values()) for _ in _ends_of_times(happened, live)]


def _wanted(totals: list[int], most: int) -> set[int]:
    if len(totals) <= most:
        return set(range(len(totals)))
    parts = max(1, most // 2)
    wanted = {0, len(totals) - 1}
    for part in range(parts):
        inside = range(len(totals) * part // parts, len(totals) * (part + 1) // parts)
        wanted.add(max(inside, key=totals.__getitem__))  # the first of equals, as locate_peak
        wanted.add(min(inside, key=totals.__getitem__))
    return wanted


# -- from a program


def of_program(program: Node) -> Timeline:
    """A program written out; tensors of an item that has pieces are events of their own, at one time."""
    walk = _Walk()
    walk.run(program)
    happened: list[TimelineEvent] = []
    first_of: dict[int, int] = {}
    fresh = 0
    for (time, moment), (handle, item, alive) in zip(walk.changes, events(program), strict=True):
        if not item.bytes:
            continue
        if alive:
            first_of[handle] = fresh
            fresh += len(item.pieces) or 1
        first = first_of[handle] if alive else first_of.pop(handle)
        happened += _written_out(time, first, item, alive, moment)
    return Timeline(events=tuple(happened), spans=tuple(sorted(walk.spans, key=_outermost_first)), end=walk.clock)


def _outermost_first(span: Span) -> tuple[int, int]:
    return span.start, span.depth


def _written_out(time: int, first: int, item: Item, alive: bool, moment: str) -> Iterator[TimelineEvent]:
    for offset, size in enumerate(item.pieces or (item.bytes,)):
        yield TimelineEvent(
            time, first + offset, size, alive, item.category, item.what, moment, item.stream, item.formula
        )


@dataclass(slots=True)
class _Frame:
    """Where moments of one name are counted: the program, one of its outermost moments, or a micro-batch of a chunk."""

    totals: dict[str, int]
    seen: dict[str, int] = field(default_factory=dict)


class _Walk:
    """Visits a program as it runs and names each change's time and moment."""

    def __init__(self) -> None:
        self.clock = 0
        self.changes: list[tuple[int, str]] = []  # of each event
        self.spans: list[Span] = []
        self._names: list[str] = []  # of the moments that are open, without those of micro-batches
        self._micro_batch = ""
        self._moment = ""
        self._depth = 0
        self._chunks: set[int] = set()

    def run(self, program: Node) -> None:
        self._chunks = _chunks(program)
        self._visit(program, _Frame(_occurrences(program, outermost=True)))

    def _visit(self, node: Node, frame: _Frame) -> None:
        if isinstance(node, Change):
            for _ in range(abs(node.count)):
                self.changes.append((self.clock, self._moment))
                self.clock += 1
        elif isinstance(node, Repeat):
            for _ in range(node.times):
                self._visit(node.child, frame)
        else:
            assert isinstance(node, Sequence)
            if node.moment is None and node.scope is None:
                for child in node.children:
                    self._visit(child, frame)
            else:
                self._enter(node, frame)

    def _enter(self, node: Sequence, frame: _Frame) -> None:
        names, micro_batch, moment = list(self._names), self._micro_batch, self._moment
        if node.scope is not None:
            name = self._scope_name(node.scope, frame)
        else:
            assert node.moment is not None
            name = self._numbered(node.moment, frame)
            self._names.append(name)
        self._moment = _words(self._names, self._micro_batch) if self._names else name
        start, place = self.clock, len(self.spans)
        self.spans.append(Span(name, start, start, self._depth))
        inner = frame
        if node.scope is not None or not self._depth:
            inner = _Frame(_occurrences(node, outermost=False))
        self._depth += 1
        for child in node.children:
            self._visit(child, inner)
        self._depth -= 1
        if self.clock == start:
            self.clock += 1
        self.spans[place] = Span(name, start, self.clock, self._depth)
        self._names, self._micro_batch, self._moment = names, micro_batch, moment

    def _scope_name(self, scope: tuple[str, int], frame: _Frame) -> str:
        kind, chunk = scope
        name = {"F": "forward", "W": "weights' gradients"}.get(kind, "backward")
        key = f"{name} {chunk}"
        frame.seen[key] = frame.seen.get(key, 0) + 1
        self._micro_batch = f"micro-batch {frame.seen[key]}"
        if len(self._chunks) > 1:
            self._micro_batch += f" of chunk {chunk}"
        self._names = []
        return f"{name}, {self._micro_batch}"

    def _numbered(self, name: str, frame: _Frame) -> str:
        """``forward of layer, 3 of 32``; a backward counts down, so that a block has one number both ways."""
        total = frame.totals.get(name, 1)
        frame.seen[name] = seen = frame.seen.get(name, 0) + 1
        if total == 1:
            return name
        return f"{name}, {total + 1 - seen if name.startswith('backward of ') else seen} of {total}"


def _words(names: list[str], micro_batch: str) -> str:
    """As the estimate names its peak: outermost moment, innermost moment, micro-batch."""
    words = ": ".join(dict.fromkeys((names[0], names[-1])))
    return ", ".join(part for part in (words, micro_batch) if part)


def _chunks(node: Node) -> set[int]:
    if isinstance(node, Sequence):
        own = {node.scope[1]} if node.scope is not None else set()
        return own.union(*(_chunks(child) for child in node.children))
    return _chunks(node.child) if isinstance(node, Repeat) else set()


def _occurrences(node: Node, *, outermost: bool) -> dict[str, int]:
    """How often each moment comes in a frame; ``outermost``: every moment in it opens a frame of its own."""
    found: dict[str, int] = {}

    def count(node: Node, times: int) -> None:
        if isinstance(node, Repeat):
            count(node.child, times * node.times)
        elif isinstance(node, Sequence):
            if node.moment is not None and node.scope is None:
                found[node.moment] = found.get(node.moment, 0) + times
            if node.scope is None and not (outermost and node.moment is not None):
                for child in node.children:
                    count(child, times)

    for child in node.children if isinstance(node, Sequence) else (node,):
        count(child, 1)
    return found
