"""What rows on their way to experts and back move through memory where a dispatcher sends a token once to each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ullage.comm.volume import once_each
from ullage.frozen import replace
from ullage.kernels.megatron_moe import pads_to_capacity
from ullage.kernels.narrow import narrow_type, recipe
from ullage.kernels.step import Context, Step
from ullage.model.graph import ROUTED, Op
from ullage.timing.work import OpWork, Pass, Traffic

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


_ALIGNED = {"mxfp8": 32, "nvfp4": 128}
"""An expert's rows are a multiple of it, by recipe; 16 for others (Megatron-Core fp8_utils.py, fp4_utils.py)."""

_PADDED_AHEAD = ("moe_router_padding_for_fp8", "moe_router_padding_for_quantization")


def pads_rows(op: Op, context: Context) -> bool:
    """Whether experts copy their rows into longer pieces before an 8- or 4-bit matmul, and their output back (Megatron-Core moe/experts.py,
    quantization_padding; Transformer Engine pytorch/module/fp8_padding.py): but where HybridEP or the router's map has padded them."""
    if context.stack != "megatron" or op.kind != "grouped_linear" or context.option("moe_grouped_gemm") is False:
        return False
    if narrow_type(op, context) is None or gathers_maps(context) or any(map(context.option, _PADDED_AHEAD)):
        return False
    aligned = _ALIGNED.get(recipe(context), 16)
    return not pads_to_capacity(context) or context.size(ROUTED) // context.size("experts") % aligned != 0


def padded(ops: Iterable[Op], context: Context) -> Iterator[OpWork]:
    """The copies: before the experts' first linear, and after their second."""
    linears = [op for op in ops if op.kind == "grouped_linear" and pads_rows(op, context)]
    if not linears:
        return
    widths = linears[0].params[0].dims[-1], linears[-1].outputs[0].dims[-1]
    for name, width in zip(("experts.padding", "experts.unpadding"), widths, strict=True):
        copied = Pass(
            traffic=(Traffic(bytes=2 * context.buffer("", (ROUTED, width)).bytes, kind="copy", dtype="bf16"),)
        )
        yield OpWork(name=name, module="moe", forward=copied, backward=copied)
