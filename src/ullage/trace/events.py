"""What a trace is, in plain Python: every allocation of a run with its life, and the account at any moment of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ullage.memory.ledger import CATEGORIES, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One allocation's life. Times are counts of events since the trace began; ``death`` None: it outlived the trace.

    bytes: as the allocator rounds. category: of memory/ledger.py. module: qualified name of the innermost module that made it ("" is
    the root). op: the torch op that did ("aten.mm"). name: of the parameter it is or belongs to, where it does. phase: the moment of
    its birth. stream: 0 is the default stream. freed_in: the module whose forward or backward let go of it. rewritten: when autograd
    wrote a sum of gradients over it.
    """

    bytes: int
    category: str
    module: str
    op: str
    birth: int
    death: int | None
    phase: str
    dtype: str
    shape: tuple[int, ...]
    name: str = ""
    stream: int = 0
    freed_in: str = ""
    rewritten: tuple[int, ...] = ()

    def alive(self, at: int) -> bool:
        return self.birth <= at and (self.death is None or self.death > at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A phase begins with the event at ``at``. what: load, forward, backward, optimizer or between; step: from 1 on, 0 is load."""

    at: int
    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}" if self.step else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of the trace: live bytes there, the phase, and the module and op whose allocation made it."""

    bytes: int
    at: int
    phase: str
    module: str
    op: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOp:
    """One op of the last step. at: the time before it ran. reads: births of the allocations that it reads.

    node: in a forward the number that autograd's next node will have (its own is the one before); in a backward the number of the
    node that runs, -1 between two nodes. called: whether a module's forward was running.
    """

    op: str
    module: str
    at: int
    node: int
    phase: str
    reads: tuple[int, ...]
    called: bool = True


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A run: everything that it allocated, in order of birth.

    name: of what was traced. modules: qualified name -> class. rank, world: of the process group that it ran as one rank of.
    ops: what ran in the last step, where it was asked for. frozen: names of the parameters that have no gradient.
    """

    name: str
    allocations: tuple[Allocation, ...]
    marks: tuple[Mark, ...]
    end: int
    modules: tuple[tuple[str, str], ...] = ()
    rank: int = 0
    world: int = 1
    notes: tuple[str, ...] = ()
    ops: tuple[TracedOp, ...] = ()
    frozen: frozenset[str] = frozenset()

    @cached_property
    def _events(self) -> tuple[Allocation | None, ...]:
        """Of each time the allocation that was born or died."""
        events: list[Allocation | None] = [None] * (self.end + 1)
        for one in self.allocations:
            events[one.birth] = one
            if one.death is not None:
                events[one.death] = one
        return tuple(events)

    def _changes(self) -> Iterator[tuple[int, int, Allocation]]:
        """(time, bytes, allocation), births and deaths in order."""
        for at, one in enumerate(self._events):
            if one is not None:
                yield at, one.bytes if one.birth == at else -one.bytes, one

    def curve(self) -> Iterator[tuple[int, int]]:
        """(time, live bytes) after every event."""
        live = 0
        for at, change, _ in self._changes():
            live += change
            yield at, live

    def live_bytes(self, at: int) -> int:
        """Live bytes after the event at ``at``."""
        return sum(one.bytes for one in self.allocations if one.alive(at))

    def span(self, step: int, what: str | None = None) -> tuple[int, int]:
        """From when to when a phase of a step lasts (the whole step without ``what``); [start, stop) in event times."""
        inside = [index for index, mark in enumerate(self.marks) if mark.step == step and what in (None, mark.what)]
        assert inside, (step, what)
        last = inside[-1] + 1
        return self.marks[inside[0]].at, self.marks[last].at if last < len(self.marks) else self.end

    @property
    def steps(self) -> int:
        return max((mark.step for mark in self.marks), default=0)

    def phase(self, at: int) -> Mark:
        found = self.marks[0]
        for mark in self.marks:
            if mark.at > at:
                break
            found = mark
        return found

    def peak(self, start: int = 0, stop: int | None = None) -> Moment:
        """The highest point in [start, stop), the first if there are several; all of the trace by default."""
        live = 0
        best = -1
        top: tuple[int, Allocation | None] = (start, None)
        for at, change, one in self._changes():
            if stop is not None and at >= stop:
                break
            if at > start and best < 0:
                best = live  # what the span begins with
            live += change
            if at >= start and live > best:
                best, top = live, (at, one)
        if best < 0:
            best = live
        at, made = top
        module, op = (made.module, made.op) if made is not None else ("", "")
        return Moment(bytes=best, at=at, phase=str(self.phase(at)), module=module, op=op)

    @property
    def steady(self) -> Moment:
        """The peak of the last step: optimizer states are there from its start."""
        return self.peak(*self.span(self.steps))

    def ledger(self, at: int) -> tuple[Line, ...]:
        """The account after the event at ``at``, by category and then by size; it adds up to ``live_bytes(at)``."""
        groups: dict[tuple[str, str], list[Allocation]] = {}
        for one in self.allocations:
            if one.bytes and one.alive(at):
                groups.setdefault((one.category, what(one)), []).append(one)
        lines = [_line(category, name, group, self) for (category, name), group in groups.items()]
        return tuple(sorted(lines, key=lambda line: (CATEGORIES.index(line.category), -line.bytes, line.what)))

    def saved(self, step: int | None = None) -> dict[str, int]:
        """Bytes that each module's own forward left for the backward (alive when the step's first backward began), by module."""
        start, _ = self.span(step or self.steps, "backward")
        totals: Counter[str] = Counter()
        for one in self.allocations:
            if one.category == "activations" and one.alive(start - 1):
                totals[one.module] += one.bytes
        return dict(totals)


_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def pattern(module: str) -> str:
    """A module's name with the indices of equal siblings left out: ``layers.*.mlp``."""
    return _INDEX.sub("*", module)


def what(one: Allocation) -> str:
    """How the ledger names an allocation: equal modules of a list together."""
    if one.name:
        return pattern(one.name)
    module = pattern(one.module) or "(root)"
    return f"{module}: {one.op}"


def _line(category: str, name: str, group: list[Allocation], trace: Trace) -> Line:
    shapes = Counter((one.shape, one.dtype) for one in group)
    terms = [
        f"{f'{count} x ' if count > 1 else ''}{' x '.join(map(str, shape)) or '1'} {dtype}"
        for (shape, dtype), count in shapes.most_common(3)
    ]
    more = len(shapes) - len(terms)
    return Line(
        category=category,
        what=name,
        bytes=sum(one.bytes for one in group),
        count=len(group),
        formula=" + ".join(terms) + (f" + {more} more shapes" if more else ""),
        provenance="traced",
        lives=_lives(group, trace),
    )


def _lives(group: Iterable[Allocation], trace: Trace) -> str:
    one = max(group, key=lambda each: each.bytes)
    end = "the end of the trace" if one.death is None else str(trace.phase(one.death))
    return f"{one.phase} to {end}"
