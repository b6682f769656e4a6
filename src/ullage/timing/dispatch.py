"""What rows on their way to experts and back move through memory where a dispatcher sends a token once to each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ullage.comm.volume import once_each
from ullage.frozen import replace
from ullage.kernels.step import Context, Step
from ullage.model.graph import ROUTED, Op

ONCE = {
    "moe_token_dispatcher_type": ("flex",),
    "moe_dispatch": ("deepep", "hybridep"),
    "expert_parallel_comm_backend": ("deepep", "hybridep"),
}
"""Options, of Megatron, its users and torchtitan, that name DeepEP's dispatch or its kin."""

_WAYS = (("sort", "permute"), ("unsort", "combine"))
"""Megatron's steps around an exchange, to the experts and back; the first only where a rank has several (kernels/megatron_moe.py)."""


def sends_once(context: Context) -> bool:
    return context.ep > 1 and any(context.option(name) in values for name, values in ONCE.items())


def gathers_maps(context: Context) -> bool:
    """Megatron's flexible dispatcher is DeepEP's where no option says otherwise (Megatron-Core transformer_config.py)."""
    return (
        context.stack == "megatron"
        and sends_once(context)
        and context.option("moe_flex_dispatcher_backend") == "hybridep"
    )


def permuted(steps: Iterable[Step], ops: Iterable[Op], context: Context) -> Iterator[Step]:
    """The steps, those of Megatron's dispatcher with what DeepEP and HybridEP move: one kernel puts the tokens that came into their
    experts' order, a row for each expert; another adds up a token's rows before they are sent back. The sending side permutes nothing
    (Megatron-Core moe/token_dispatcher.py, _DeepepManager; HybridEP's dispatch_with_permute)."""
    steps = tuple(steps)
    sent = next((op for op in ops if op.kind == "dispatch"), None)
    if context.stack != "megatron" or sent is None or not sends_once(context):
        yield from steps
        return
    rows = context.buffer("rows", (ROUTED, sent.outputs[0].dims[-1])).bytes
    moved = rows + round(rows * once_each(context.size("top_k"), context.ep))
    names = [step.name for step in steps]
    local = [next(name for name in way if name in names) for way in _WAYS]
    for step in steps:
        each = moved if step.name in local else 0
        yield replace(step, moves=(each, each)) if any(step.name in way for way in _WAYS) else step
