"""Gathers and reductions of sharded blocks beside their computing: two streams, one wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ullage.frozen import frozen

Span = tuple[float, float]


@frozen
class Wrapped:
    """A block that an engine gathers before it runs and reduces after its backward; seconds of each on its own.

    hindered_s: how much longer the block would compute if the wire were busy all the while.
    """

    compute_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0
    hindered_s: float = 0.0

    def end(self, start: float, busy: Iterable[Span]) -> float:
        """When computing that begins at ``start`` ends. busy: when the wire is, in order."""
        if not self.hindered_s:
            return start + self.compute_s
        slowdown = 1.0 + self.hindered_s / self.compute_s
        now, left = start, self.compute_s
        for begin, end in busy:
            free = max(begin, now) - now
            if left <= free:
                break
            now, left = now + free, left - free
            span = max(0.0, end - now)
            if left * slowdown <= span:
                return now + left * slowdown
            now, left = now + span, left - span / slowdown
        return now + left


def forward_s(blocks: Sequence[Wrapped]) -> float:
    """The first gather is waited for; a later one may start when the block two before it starts to compute.

    FSDP2 issues them in order, each behind the copy out of the one before the last (_fsdp_param_group.py, wait_for_unshard).
    """
    end = 0.0
    gathers: list[Span] = []

    def gather(earliest: float) -> None:
        block = blocks[len(gathers)]
        begin = max(gathers[-1][1], earliest) if gathers else 0.0
        gathers.append((begin, begin + block.gather_s))

    for _ in blocks[:2]:
        gather(0.0)
    for at, block in enumerate(blocks):
        start = max(end, gathers[at][1])
        if at + 2 < len(blocks):
            gather(start)
        end = block.end(start, gathers[at + 1 : at + 3])
    return end


def backward_s(blocks: Sequence[Wrapped]) -> float:
    """blocks: in the order of the backward. The next block's gather is asked for when a block starts, its reduction when it ends.

    Both share one wire; the step goes on when the last reduction is through.
    """
    if not blocks:
        return 0.0
    wire = blocks[0].gather_s
    end = 0.0
    ready = wire
    reduction: Span = (0.0, 0.0)
    for at, block in enumerate(blocks):
        start = max(end, ready)
        busy = [reduction]
        if at + 1 < len(blocks) and blocks[at + 1].gather_s:
            begin = max(wire, start)
            ready = wire = begin + blocks[at + 1].gather_s
            busy.append((begin, wire))
        end = block.end(start, busy)
        if block.reduce_s:
            begin = max(wire, end)
            wire = begin + block.reduce_s
            reduction = (begin, wire)
    return max(end, wire)
