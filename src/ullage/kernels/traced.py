"""A traced module's layer code: every op of a traced graph says what it allocated, saved and freed, in bytes (trace/steps.py).

What a trace found it found at one shape: the sizes do not follow the job's batch, and no layout divides them.
"""

from __future__ import annotations

from typing import cast

from ullage.errors import Unsupported
from ullage.frozen import FrozenMap
from ullage.kernels.step import Buffer, Context, Crossing, Segment, Step, WeightGrad
from ullage.model.graph import Block, Op

KIND = "traced"


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    """The steps of a block, as they were traced."""
    if context.tp > 1 or context.cp > 1:
        degree = ("layout.tp", context.tp) if context.tp > 1 else ("layout.cp", context.cp)
        raise Unsupported(
            "needs a placement table: a traced module has sizes and no named dimensions",
            key=degree[0],
            value=degree[1],
            remedy="shard its parameters (dp, ZeRO), or recompute",
        )
    return tuple(_step(op) for op in block.ops)


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    raise Unsupported(
        "a traced module has no policy of its own",
        key="recompute",
        value="selective",
        remedy="use full, or name modules",
    )


def _step(op: Op) -> Step:
    """A gradient that outlives the node that made it is one of an alias of its own size, of a tensor without bytes."""
    attrs = op.attrs
    return Step(
        name=op.name,
        reads=_names(attrs, "reads"),
        writes=_buffers(attrs, "writes"),
        aliases=tuple((buffer, f"{buffer.name}.of") for buffer in _buffers(attrs, "gradients")),
        saves=_names(attrs, "saves"),
        scratch=_buffers(attrs, "scratch"),
        backward_scratch=_buffers(attrs, "backward_scratch"),
        no_grad=_names(attrs, "no_grad"),
        weights=tuple(
            WeightGrad(param, numel, dtype)
            for param, numel, dtype in cast("tuple[tuple[str, int, str], ...]", attrs.get("weights", ()))
        ),
        holds=_names(attrs, "holds"),
        caches=_names(attrs, "caches"),
        module=op.module,
        borrows=_crossings(attrs, "borrows"),
        lends=_crossings(attrs, "lends"),
        sends=_crossings(attrs, "sends"),
        receives=_crossings(attrs, "receives"),
    )


def _names(attrs: FrozenMap, key: str) -> tuple[str, ...]:
    return cast("tuple[str, ...]", attrs.get(key, ()))


def _crossings(attrs: FrozenMap, key: str) -> tuple[Crossing, ...]:
    """(name, slot, bytes), and of a tensor whether it has a gradient."""
    found = cast("tuple[tuple[str, int, int] | tuple[str, int, int, bool], ...]", attrs.get(key, ()))
    return tuple(Crossing(name, slot, size, grad=any(grad)) for name, slot, size, *grad in found)


def _buffers(attrs: FrozenMap, key: str) -> tuple[Buffer, ...]:
    found = cast("tuple[tuple[str, int, str, str], ...]", attrs.get(key, ()))
    return tuple(Buffer(name, size, what, formula) for name, size, what, formula in found)
