"""Gathers and reductions of sharded blocks beside their computing: two streams, one wire."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.frozen import frozen


@frozen
class Wrapped:
    """A block that an engine gathers before it runs and reduces after its backward; seconds of each on its own."""

    compute_s: float
    gather_s: float = 0.0
    reduce_s: float = 0.0


def forward_s(blocks: Sequence[Wrapped]) -> float:
    """The first gather is waited for; a later one may start when the block two before it starts to compute.

    FSDP2 issues them in order, each behind the copy out of the one before the last (_fsdp_param_group.py, wait_for_unshard).
    """
    gathered = end = 0.0
    starts: list[float] = []
    for at, block in enumerate(blocks):
        begin = max(gathered, starts[at - 2]) if at >= 2 else gathered
        gathered = begin + block.gather_s if block.gather_s else gathered
        start = max(end, gathered)
        starts.append(start)
        end = start + block.compute_s
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
    for at, block in enumerate(blocks):
        start = max(end, ready)
        if at + 1 < len(blocks) and blocks[at + 1].gather_s:
            wire = max(wire, start) + blocks[at + 1].gather_s
            ready = wire
        end = start + block.compute_s
        if block.reduce_s:
            wire = max(wire, end) + block.reduce_s
    return max(end, wire)
