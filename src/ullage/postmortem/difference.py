"""Where a snapshot's memory is and another's is not: of another run, or of the job as its account predicts it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ullage.errors import InvalidInput
from ullage.frozen import frozen
from ullage.memory.program import Item, round_up
from ullage.postmortem.causes import Reason
from ullage.postmortem.evidence import Block, Evidence
from ullage.postmortem.snapshot_frames import UNKNOWN
from ullage.units import format_bytes

if TYPE_CHECKING:
    from ullage.postmortem.with_job import Held

_GREW = 1.05
"""Two steps of one run differ by less, unless something is kept."""


@frozen
class Line:
    """what: the code that made the blocks, or what the account calls its tensors. against_bytes: of the other side."""

    category: str
    what: str
    bytes: int
    against_bytes: int

    @property
    def more_bytes(self) -> int:
        return self.bytes - self.against_bytes


@frozen
class Difference:
    """against: what the snapshot is held against, in words. moment: what is compared. categories: every one that either side has, ``what``
    empty; lines: what differs, the largest difference first. by_size: whether equal sizes alone matched some blocks."""

    against: str
    moment: str
    categories: tuple[Line, ...]
    lines: tuple[Line, ...]
    by_size: bool = False

    @property
    def more_bytes(self) -> int:
        return sum(one.more_bytes for one in self.categories)


def between(one: Evidence, other: Evidence) -> Difference:
    """Two snapshots, each at its history's highest where both have one. Raises InvalidInput for what is no snapshot."""
    for given, key in ((one, "INPUT"), (other, "--against")):
        if not given.blocks:
            raise InvalidInput(
                "is no snapshot that holds anything",
                key=key,
                value=given.source,
                allowed="two files that torch.cuda.memory._dump_snapshot() wrote; to hold one against a job, --job",
            )
    recorded = bool(one.highest and other.highest)
    sides = [given.highest if recorded else given.blocks for given in (one, other)]
    mine, theirs = (
        _totals((block.category, block.where, block.bytes * block.count) for block in side) for side in sides
    )
    return Difference(
        against=other.source,
        moment="at the highest of both histories" if recorded else "as both were taken",
        categories=_categories(mine, theirs),
        lines=_lines(mine, theirs),
    )


def predicted(one: Evidence, held: Held, stages: int) -> Difference:
    """A snapshot and a rank's account: at the peak, or where no history was recorded and what is held is nearer to it, between steps.

    A block is taken for a tensor of the account of its category and size, as often as the account has it; what no call stack names, of
    any category. Those that are left on either side are the lines.
    """
    account, peak = held.account, held.peak
    blocks = one.highest or one.blocks
    total = sum(block.bytes * block.count for block in blocks)
    at_rest = not one.highest and abs(total - account.static_bytes) < abs(total - peak.bytes)
    live = list(account.static) if at_rest else list(peak.live.items())
    there = _Tensors(live)
    left = [*there.without([block for block in blocks if block.category != UNKNOWN])]
    seen = there.matched_bytes.copy()
    left += there.without([block for block in blocks if block.category == UNKNOWN])
    theirs = _totals((item.category, item.what, item.bytes * count) for item, count in live)
    mine = there.matched_bytes
    both = mine + _totals((block.category, block.where, block.bytes * count) for block, count in left)
    return Difference(
        against="the account of the job" if stages == 1 else f"the account of stage {held.rank.index} of {stages}",
        moment="between two steps" if at_rest else "at the peak",
        categories=_categories(both, theirs),
        lines=_lines(both, theirs),
        by_size=seen != mine,
    )


class _Tensors:
    """The tensors of an account that are live, by category and size. matched_bytes: of those that a block was taken for, by name."""

    def __init__(self, live: Iterable[tuple[Item, int]]) -> None:
        self.matched_bytes: Counter[tuple[str, str]] = Counter()
        self._names: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        self._categories: list[str] = []
        for item, count in live:
            for size in (item.pieces or (item.bytes,)) * count:
                self._names[item.category, size].append(item.what)
        self._categories = sorted({category for category, _ in self._names})

    def without(self, blocks: Sequence[Block]) -> Iterator[tuple[Block, int]]:
        """Takes the blocks out; those with no tensor of their own come back, with how many."""
        for block in blocks:
            size = round_up(block.requested_bytes)
            left = block.count
            for category in self._categories if block.category == UNKNOWN else (block.category,):
                names = self._names.get((category, size), [])
                while names and left:
                    self.matched_bytes[category, names.pop()] += size
                    left -= 1
            if left:
                yield block, left


def grown(difference: Difference) -> Iterator[Reason]:
    """More than in the snapshot before it."""
    before = sum(one.against_bytes for one in difference.categories)
    most = difference.lines[0] if difference.lines else None
    if most is None or difference.more_bytes < (_GREW - 1) * before or most.more_bytes <= 0:
        return
    yield Reason(
        kind="leak",
        weight=1.5,
        why=f"{format_bytes(difference.more_bytes)} more is held than in {difference.against} {difference.moment}, "
        f"{format_bytes(most.more_bytes)} of it {most.category} of {most.what or 'no recorded call'}: of two steps of one run, it is kept",
    )


def _totals(found: Iterable[tuple[str, str, int]]) -> Counter[tuple[str, str]]:
    totals: Counter[tuple[str, str]] = Counter()
    for category, what, size in found:
        totals[category, what] += size
    return totals


def _lines(mine: Counter[tuple[str, str]], theirs: Counter[tuple[str, str]]) -> tuple[Line, ...]:
    found = [
        Line(category=category, what=what, bytes=mine[category, what], against_bytes=theirs[category, what])
        for category, what in mine.keys() | theirs.keys()
        if mine[category, what] != theirs[category, what]
    ]
    return tuple(sorted(found, key=lambda one: (-abs(one.more_bytes), one.category, one.what)))


def _categories(mine: Counter[tuple[str, str]], theirs: Counter[tuple[str, str]]) -> tuple[Line, ...]:
    sides = [_totals((category, "", size) for (category, _), size in side.items()) for side in (mine, theirs)]
    found = [
        Line(category=category, what="", bytes=sides[0][category, ""], against_bytes=sides[1][category, ""])
        for category, _ in sides[0].keys() | sides[1].keys()
    ]
    return tuple(sorted(found, key=lambda one: (-abs(one.more_bytes), one.category)))
