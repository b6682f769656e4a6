"""Kernels that make the operands of an 8- or 4-bit matmul: bytes that they move."""

from __future__ import annotations

from ullage.kernels.narrow import SCALE_BYTES, operand_bytes, orders, recipe
from ullage.kernels.step import Context
from ullage.model.graph import Op
from ullage.timing.exchanges import gathers_narrow
from ullage.timing.work import Matmul, Traffic

_Kernels = tuple[Traffic, ...]


def casts(op: Op, matmul: Matmul, context: Context, *, first: bool) -> tuple[_Kernels, _Kernels]:
    """Forward and backward, beside the forward's ``matmul`` of an op. first: of the projections that share an input."""
    if matmul.dtype == context.compute or context.narrow is None:
        return (), ()
    if context.stack == "megatron":
        return _of_transformer_engine(op, matmul, context)
    return _of_torchao(op, matmul, context, first=first)


def fuses_experts(context: Context) -> bool:
    """Whether the experts' linears and what is between them are kernels that hand each other blocks with scales: Transformer Engine's
    operation fuser on Blackwell (pytorch/ops/fused/grouped_mlp.py; Megatron-Core moe/experts.py, _fused_forward, where the paged stash
    is too)."""
    asked = context.option("use_transformer_engine_op_fuser") or context.option("moe_paged_stash")
    blackwell = context.compute_capability is not None and context.compute_capability >= (10, 0)
    return bool(asked) and blackwell and context.stack == "megatron" and recipe(context) in SCALE_BYTES


def _beside_fused(op: Op, matmul: Matmul, how: str) -> tuple[_Kernels, _Kernels]:
    """Of fused experts the first linear's input is cast, and the gradient of the second one's output; the rest leaves the matmuls' own
    kernels as it is multiplied."""
    first = op.outputs[0].dims[-1] == "expert_ffn"
    passes = 2 if how == "nvfp4" else 1
    numel = matmul.groups * matmul.m * (matmul.k if first else matmul.n)
    cast = (Traffic(bytes=passes * 2 * numel + 2 * operand_bytes(numel, matmul.dtype, how), kind="quantize"),)
    return (cast, ()) if first else ((), cast)


def _of_torchao(op: Op, matmul: Matmul, context: Context, *, first: bool) -> tuple[_Kernels, _Kernels]:
    """float8/float8_linear.py: the input's and the weight's maximum (2 bytes an element read) and copy (3); a copy again for the weight's
    gradient; the output's gradient likewise, and its transposed copy (2).

    NVFP4Linear: each read for its maximum, read again and written in two orders (prototype/moe_training/nvfp4_training/nvfp4_linear.py).
    """
    source, weight, gradient = matmul.m * matmul.k, matmul.n * matmul.k, matmul.m * matmul.n
    if matmul.dtype == "fp4":
        return _in_two_orders(source + weight), _in_two_orders(gradient)
    column = op.attrs.get("parallel") == "column"
    made = (source // context.tp if column and gathers_narrow(context) else source) if first else 0
    return _copied(5 * (made + weight)), _copied(3 * (made + weight) + 7 * gradient)


def _in_two_orders(numel: int) -> _Kernels:
    return (Traffic(bytes=2 * 2 * numel + 2 * operand_bytes(numel, "fp4", "nvfp4"), kind="quantize_triton"),)


def _copied(moved: int) -> _Kernels:
    return (Traffic(bytes=moved, kind="copy"),)


def _of_transformer_engine(op: Op, matmul: Matmul, context: Context) -> tuple[_Kernels, _Kernels]:
    """An input and the output's gradient are read, in 16 bits, and written in each order that is multiplied (csrc/quantizer.cpp; experts'
    by one kernel for all of them, tex.split_quantize); weights once a step, which is not counted.

    A norm makes its output in 8 bits where the scale is known ahead (delayed), its maximum with it where one scale serves all
    (tensorwise); not where blocks have scales (csrc/extensions/normalization.cpp, Impl). NVFP4 has a scale for all beside the blocks':
    its maximum is a pass of its own, a Hadamard transform of the second order part of either pass (NVFP4Quantizer::quantize_impl). Of an
    input that is gathered each rank casts its own part.
    """
    how = recipe(context)
    passes = 2 if how in ("tensorwise", "nvfp4") else 1
    column = op.attrs.get("parallel") == "column"
    if op.kind == "grouped_linear" and fuses_experts(context):
        return _beside_fused(op, matmul, how)
    source, gradient = (matmul.groups * matmul.m * width for width in (matmul.k, matmul.n))
    if column and gathers_narrow(context):
        source //= context.tp
    elif op.attrs.get("parallel") == "row" and gathers_narrow(context):
        gradient //= context.tp
    written = len(orders(how, context.compute_capability))

    def cast(numel: int, reads: int) -> _Kernels:
        moved = reads * 2 * numel + written * operand_bytes(numel, matmul.dtype, how)
        return (Traffic(bytes=moved, kind="quantize"),) if reads else ()

    made_by_norm = {"delayed": 0, "tensorwise": 1}.get(how, passes)
    return cast(source, made_by_norm if column else passes), cast(gradient, passes)
