"""Walks a block's ops and hands each, or each fused group of neighbours, to a stack's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from ullage.errors import Unsupported
from ullage.kernels.step import Context, Segment, Step, without_experts, without_loss
from ullage.model.graph import Block, Op

Kernel = Callable[[tuple[Op, ...], Context], list[Step]]
"""Lowers one op, or the ops of one fused group, into steps."""


_Kernel = TypeVar("_Kernel")

_KNOWN_BY = {
    **dict.fromkeys(("ssm", "ssm_norm"), "megatron"),
    **dict.fromkeys(
        ("query_gate", "output_gate", "delta_split", "causal_conv", "delta_rule", "gated_norm"), "transformers"
    ),
}
"""Kinds of op that one stack alone has kernels for."""


def of_loss(op: Op) -> bool:
    """Whether what it does depends on the kind of loss: a loss, or what makes its logits."""
    return op.kind == "loss" or op.name.endswith("lm_head")


def refuse_family(block: Block, context: Context, families: frozenset[str]) -> None:
    """Raises Unsupported for a family of which a stack has no model. families: those that it has."""
    if block.family and block.family not in families:
        raise Unsupported(
            f"has no model of type {block.family} that is known here",
            key="stack",
            value=context.stack,
            allowed=", ".join(sorted(families)),
            remedy="use stack transformers",
        )


def kernel_of(kernels: Mapping[str, _Kernel], op: Op, context: Context) -> _Kernel:
    """A stack's kernel for an op. Unsupported where it has none."""
    kernel = kernels.get(op.kind)
    if kernel is None:
        remedy = f"use stack {_KNOWN_BY[op.kind]}" if op.kind in _KNOWN_BY else None
        what = f"has no kernel for op {op.name!r} of kind {op.kind!r}"
        raise Unsupported(what, key="stack", value=context.stack, remedy=remedy)
    return kernel


def lower_ops(
    block: Block, context: Context, kernels: Mapping[str, Kernel], *, fused: frozenset[str] = frozenset()
) -> tuple[Step, ...]:
    """The steps of a block. ``fused`` names the kinds whose ops of one ``group`` attribute become one kernel call."""
    steps: list[Step] = []
    contexts = {
        (False, False): without_loss(without_experts(context)),
        (False, True): without_experts(context),
        (True, False): without_loss(context),
        (True, True): context,
    }
    for ops, knows in _groups(block, fused):
        kernel = kernel_of(kernels, ops[0], context)
        steps += _lowered(kernel, ops, contexts[knows])
    return tuple(steps)


@lru_cache(maxsize=8192)
def _lowered(kernel: Kernel, ops: tuple[Op, ...], context: Context) -> tuple[Step, ...]:
    return tuple(kernel(ops, context))


@lru_cache(maxsize=256)
def _groups(block: Block, fused: frozenset[str]) -> tuple[tuple[tuple[Op, ...], tuple[bool, bool]], ...]:
    """Ops that one kernel lowers, and whether they know of experts, and of the loss."""
    return tuple([(ops, (any(op.of_experts for op in ops), any(map(of_loss, ops)))) for ops in _grouped(block, fused)])


def _grouped(block: Block, fused: frozenset[str]) -> Iterator[tuple[Op, ...]]:
    waiting: list[Op] = []
    for op in block.ops:
        group = op.attrs.get("group") if op.kind in fused else None
        if waiting and group != waiting[0].attrs.get("group"):
            yield tuple(waiting)
            waiting = []
        if group:
            waiting.append(op)
        else:
            yield (op,)
    if waiting:
        yield tuple(waiting)


def module_segments(
    steps: tuple[Step, ...],
    modules: tuple[str, ...],
    *,
    discards_output: frozenset[str] = frozenset(),
    inside: tuple[tuple[str, str], ...] = (),
) -> tuple[Segment, ...]:
    """Runs of neighbouring steps that belong to one of the named modules, each run one segment.

    inside: modules that are part of another one, which runs them again where it is named.
    """
    outer = {part: whole for part, whole in inside if whole in modules}
    outermost = [outer.get(step.module, step.module) for step in steps]
    found = []
    start = 0
    for at in range(1, len(steps) + 1):
        if at == len(steps) or outermost[at] != outermost[start]:
            module = outermost[start]
            if module in modules:
                found.append(Segment(start=start, stop=at, discards_output=module in discards_output))
            start = at
    return tuple(found)
