"""Bytes that a block's forward leaves behind, for the many shapes of a block that a search asks about.

Which tensors stay follows from what the steps read, make, save and name, not from how large any of it is: one replay tells it for all
contexts whose steps are alike. Of each context the bytes of what stays are then added up.
"""

from __future__ import annotations

from functools import lru_cache

from ullage.frozen import frozen
from ullage.job.job import Recompute
from ullage.kernels.step import Context, Step
from ullage.memory.block_replay import BlockReplay
from ullage.memory.chunk import CHECKPOINT, PLAIN, SELECTIVE, Element, block_steps
from ullage.memory.program import round_up
from ullage.model.graph import Block

_MODES = {"none": PLAIN, "full": CHECKPOINT, "modules": SELECTIVE}

_Names = tuple[object, ...]
"""All of a block's steps that a forward's lives depend on."""


@frozen
class _Told:
    """A block's steps under one context. alike: one object for all whose tensors live as long. sizes: bytes of what the steps write, in
    order, then of the block's input, as the allocator rounds them. crosses: whether it reads or makes what skips blocks."""

    alike: _Alike
    crosses: bool
    sizes: tuple[int, ...]


class _Alike:
    """Steps whose tensors live as long, whatever their sizes. left: by recomputation, where in ``sizes`` that is what stays."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: dict[tuple[str, tuple[str, ...]], tuple[int, ...]] = {}


def left_bytes(block: Block, context: Context, recompute: Recompute) -> int | None:
    """What a forward leaves of a block between others, less the input that it takes over: as its replay says (memory/chunk.py).

    None where only a replay of its neighbours tells: something crosses blocks beside the stream (memory/handing.py), or not every layer
    is recomputed like this.
    """
    told = _told(block, context)
    if told.crosses or recompute.kind not in _MODES:
        return None
    key = recompute.kind, recompute.modules
    if key not in told.alike.left:
        told.alike.left[key] = _left(block, context, recompute)
    return sum([told.sizes[at] for at in told.alike.left[key]]) - told.sizes[-1]


@lru_cache(maxsize=4096)
def _told(block: Block, context: Context) -> _Told:
    whole = block_steps(Element(block=block), context, Recompute())
    written = [one.bytes for step in whole.steps for one in step.writes]
    return _Told(
        alike=_alike((context.stack, block.name, whole.input, whole.output, *map(_names, whole.steps))),
        crosses=any(step.borrows or step.lends or step.sends or step.receives for step in whole.steps),
        sizes=tuple(map(round_up, (*written, whole.input_bytes))),
    )


@lru_cache(maxsize=1024)
def _alike(_: _Names) -> _Alike:
    return _Alike()


def _names(step: Step) -> _Names:
    return (
        step.module,
        step.reads,
        step.saves,
        len(step.writes),
        step.made,
        tuple(of for _, of in step.aliases),
        step.holds,
        step.caches,
        step.offloads,
    )


def _left(block: Block, context: Context, recompute: Recompute) -> tuple[int, ...]:
    """Places in ``_Told.sizes``."""
    whole = block_steps(Element(block=block, mode=_MODES[recompute.kind]), context, recompute)
    names = [one.name for step in whole.steps for one in step.writes]
    stay = BlockReplay(whole).left()
    return tuple(at for at, name in enumerate([*names, whole.input]) if name in stay)
