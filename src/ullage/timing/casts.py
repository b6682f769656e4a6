"""Kernels that make the operands of an 8-bit matmul: bytes that they move."""

from __future__ import annotations

from ullage.kernels.narrow import orders, recipe
from ullage.kernels.step import Context
from ullage.model.graph import Op
from ullage.timing.exchanges import gathers_narrow
from ullage.timing.work import Matmul, Traffic

_Kernels = tuple[Traffic, ...]

AMAX_BYTES = 2
"""Of an element: a 16-bit tensor read for its maximum, before a scale for all of it is known."""


def casts(op: Op, matmul: Matmul, context: Context, *, first: bool) -> tuple[_Kernels, _Kernels]:
    """Forward and backward, beside the forward's ``matmul`` of an op. first: of the projections that share an input."""
    if matmul.dtype == context.compute or context.narrow is None:
        return (), ()
    if context.stack == "megatron":
        return _of_transformer_engine(op, matmul, context)
    return _of_torchao(op, matmul, context, first=first)


def _of_torchao(op: Op, matmul: Matmul, context: Context, *, first: bool) -> tuple[_Kernels, _Kernels]:
    """float8/float8_linear.py: the input's and the weight's maximum (2 bytes an element read) and copy (3); a copy again for the weight's
    gradient; the output's gradient likewise, and its transposed copy (2)."""
    source, weight, gradient = matmul.m * matmul.k, matmul.n * matmul.k, matmul.m * matmul.n
    column = op.attrs.get("parallel") == "column"
    made = (source // context.tp if column and gathers_narrow(context) else source) if first else 0
    return _copied(5 * (made + weight)), _copied(3 * (made + weight) + 7 * gradient)


def _copied(moved: int) -> _Kernels:
    return (Traffic(bytes=moved, kind="copy"),)


def _of_transformer_engine(op: Op, matmul: Matmul, context: Context) -> tuple[_Kernels, _Kernels]:
    """An input and the output's gradient are read and written in each order that is multiplied (csrc/quantizer.cpp; experts' by a kernel
    for all of them, tex.split_quantize); weights once a step, which is not counted.

    A norm makes its output in 8 bits where the scale is known ahead (delayed), its maximum with it where one scale serves all
    (tensorwise); not where blocks have scales (csrc/extensions/normalization.cpp, Impl). Of an input that is gathered each rank casts its
    own part.
    """
    how = recipe(context)
    cast = 2 + len(orders(how, context.compute_capability))
    amax = AMAX_BYTES if how == "tensorwise" else 0
    column = op.attrs.get("parallel") == "column"
    source, gradient = (matmul.groups * matmul.m * width for width in (matmul.k, matmul.n))
    if column and gathers_narrow(context):
        source //= context.tp
    here = (0 if how == "delayed" else cast) if column else amax + cast
    gradients = gradient // context.tp if op.attrs.get("parallel") == "row" and gathers_narrow(context) else gradient
    return _quantized(source * here), _quantized(gradients * (amax + cast))


def _quantized(moved: int) -> _Kernels:
    return (Traffic(bytes=moved, kind="quantize"),) if moved else ()
