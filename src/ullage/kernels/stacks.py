"""Stacks: whose layer code runs an op. A stack is a table from kinds of op to the function that lowers it into steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from ullage.errors import Unsupported
from ullage.frozen import frozen, replace
from ullage.job.job import Recompute
from ullage.job.saved_modules import ORIGINAL
from ullage.kernels.asking import asked
from ullage.kernels.lowering import module_segments
from ullage.kernels.step import Buffer, Context, Segment, Step
from ullage.model.graph import Block, Op

Lowering = Callable[[Block, Context], tuple[Step, ...]]
"""Turns a whole block into steps: a stack may fuse neighbours (q, k and v projections; gate and up)."""

Policy = Callable[[tuple[Step, ...], Context], tuple[Segment, ...]]
"""The stack's own meaning of selective recomputation."""

Kernel = Callable[[Op, Context], list[Step]]

STACKS: Mapping[str, str] = {
    "transformers": "ullage.kernels.transformers",
    "liger": "ullage.kernels.liger",
    "unsloth": "ullage.kernels.unsloth",
    "torchtune": "ullage.kernels.torchtune",
    "litgpt": "ullage.kernels.litgpt",
    "torchtitan": "ullage.kernels.torchtitan",
    "megatron": "ullage.kernels.megatron",
    "traced": "ullage.kernels.traced",
}
"""Where each stack's ``lower(block, context)`` lives; loaded when first asked for, so that a command pays for one stack."""


@lru_cache(maxsize=1024)
def lower(block: Block, context: Context) -> tuple[Step, ...]:
    """The steps of a block in the layer code of ``context.stack``."""
    lowering: Lowering = _module(context.stack).lower
    if any(op.kind == ORIGINAL for op in block.ops):
        block = replace(block, ops=tuple(op for op in block.ops if op.kind != ORIGINAL))
    steps = lowering(block, context)
    return steps if context.stack == "traced" else asked(block, steps)  # a trace's steps are what was asked for


@lru_cache(maxsize=1024)
def segments(block: Block, context: Context, recompute: Recompute) -> tuple[Segment, ...]:
    """The parts of a block that selective recomputation runs again: the stack's own policy, or the modules that the job names."""
    steps = lower(block, context)
    stack = _module(context.stack)
    if recompute.kind == "modules":
        chosen: Callable[..., tuple[Segment, ...]] = getattr(stack, "modules", module_segments)
        return chosen(steps, recompute.modules)
    policy: Policy = stack.selective
    return policy(steps, context)


def unmet(recompute: Recompute, layers: Iterable[Block], context: Context) -> tuple[str, ...]:
    """A warning of modules that a job runs again and none of its layers has."""
    if not recompute.modules:
        return ()
    there = {step.module for block in layers for step in lower(block, context)} - {""}
    missing = ", ".join(name for name in recompute.modules if name not in there)
    known = ", ".join(sorted(there))
    return (
        (f"recompute.modules = {missing}: no part of these layers is called so; they have {known}",) if missing else ()
    )


@frozen
class Modules:
    """What a layer can recompute piece by piece, by name; inside: those that are part of another one, and it."""

    names: tuple[str, ...]
    inside: tuple[tuple[str, str], ...]


def recomputable(layers: Iterable[Block], context: Context) -> Modules:
    """The modules of these layers that the stack lets its users choose from."""
    stack = _module(context.stack)
    there = {step.module for block in layers for step in lower(block, context)}
    return Modules(
        names=tuple(name for name in getattr(stack, "RECOMPUTABLE", ()) if name in there),
        inside=tuple(pair for pair in getattr(stack, "INSIDE", ()) if pair[0] in there),
    )


def buffers(context: Context) -> tuple[Buffer, ...]:
    """Buffers that the stack's model registers (rotary tables)."""
    made: Callable[[Context], tuple[Buffer, ...]] | None = getattr(_module(context.stack), "buffers", None)
    return made(context) if made is not None else ()


def left(block: Block, context: Context) -> tuple[Buffer, ...]:
    """What a block's forward leaves beyond its own backward, until the loss of the next micro-batch has the name of this one's."""
    found: Callable[[Block, Context], tuple[Buffer, ...]] | None = getattr(_module(context.stack), "left", None)
    return found(block, context) if found is not None else ()


def named(block: Block, context: Context) -> tuple[Buffer, ...]:
    """What a block's forward made that the training loop's names keep through the backward, saved by no node of autograd's."""
    found: Callable[[Block, Context], tuple[Buffer, ...]] | None = getattr(_module(context.stack), "named", None)
    return found(block, context) if found is not None else ()


def _module(stack: str) -> ModuleType:
    module = STACKS.get(stack)
    if module is None:
        raise Unsupported(
            "is not modelled", key="stack", value=stack, allowed=", ".join(STACKS), remedy="name one of these"
        )
    return import_module(module)
