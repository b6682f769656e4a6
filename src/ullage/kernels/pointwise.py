"""Ops that eager PyTorch runs as they stand, in whichever stack: sums, dropout, concatenation, a gated activation unfused."""

from __future__ import annotations

from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import Op


def residual(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    output = context.tensor(op.outputs[0], "residual stream")
    return [Step(name=op.name, reads=op.inputs, writes=(output,), passes=op.inputs)]


def dropout(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Dropout keeps a mask of one byte an element."""
    (op,) = ops
    mask = context.buffer(f"{op.name}.mask", op.outputs[0].dims, "bool", f"{op.name} mask")
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(context.tensor(op.outputs[0], f"{op.name} output"), mask),
            saves=(mask.name,),
            module=op.module,
        )
    ]


def concat(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """One new tensor out of several, of which nothing is saved: a concatenation, or a sum."""
    (op,) = ops
    return [Step(name=op.name, reads=op.inputs, writes=(context.tensor(op.outputs[0]),), module=op.module)]


def gated(op: Op, output: Buffer) -> list[Step]:
    """SwiGLU and its like as two autograd nodes: act(gate), times up."""
    gate, up = op.inputs
    activated = Buffer(f"{op.name}.gate", output.bytes, f"{op.name}: activated gate", output.formula)
    return [
        Step(name=f"{op.name}.gate", reads=(gate,), writes=(activated,), saves=(gate,), module=op.module),
        Step(name=op.name, reads=(activated.name, up), writes=(output,), saves=(activated.name, up), module=op.module),
    ]
