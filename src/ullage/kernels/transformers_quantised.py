"""Linears whose weight bitsandbytes keeps in four bits, as its autograd function and PEFT's layer around it run them."""

from __future__ import annotations

from dataclasses import replace

from ullage.job.adapted import QUANTISED
from ullage.kernels import transformers_adapters as adapters
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer
from ullage.model.graph import Dim, Op

BLOCK = 64
"""Weights that share a scale (nn/modules.py, Params4bit)."""


def is_quantised(op: Op) -> bool:
    return any(param.elements in QUANTISED for param in op.params)


def linear(tape: Tape, op: Op, name: str, source: Value, dims: tuple[Dim, ...], output: Value) -> Value:
    """One Linear4bit, with an adapter beside it where the op has one. output: in the input's type, as Linear4bit gives it."""
    if not adapters.is_adapted(op):
        return _linear4bit(tape, op, name, source, dims, output)
    base = _linear4bit(tape, op, name, source, dims, replace(output, name=f"{output.name}.base"))
    clone = replace(output, name=f"{output.name}.clone")
    tape.emit(clone.name, (base,), clone, passes=(base,))
    return adapters.added_to_quantised(tape, op, source, clone, output)


def _linear4bit(tape: Tape, op: Op, name: str, source: Value, dims: tuple[Dim, ...], output: Value) -> Value:
    """Linear4bit.forward (nn/modules.py): the input in the compute type, MatMul4Bit, and back into the input's type.

    MatMul4Bit (autograd/_functions.py) makes the whole weight for each of its matmuls, forward and backward, and saves none of its
    input. (backends/cuda/ops.py, gemm_4bit: at most 1536 rows may be multiplied without it, forward alone.)
    """
    cast = tape.cast(source, tape.context.compute, f"{name}.input")
    made = output if output.dtype == cast.dtype else Value(f"{output.name}.narrow", output.dims, cast.dtype)
    whole = tape.context.buffer(f"{name}.dequantised", dims, cast.dtype, f"{name} weight, dequantised")
    double = any(param.elements == "nf4-double" for param in op.params)
    tape.emit(
        name,
        (cast,),
        made,
        what=f"{name} output",
        scratch=(whole, *_scales(tape, name, dims)) if double else (whole,),
        backward_scratch=(whole,),
        op="matmul_4bit",
    )
    return tape.cast(made, output.dtype, output.name)


def _scales(tape: Tape, name: str, dims: tuple[Dim, ...]) -> tuple[Buffer, Buffer]:
    """The scales in fp32, before and after their mean is added."""
    rows = -(-tape.context.numel(dims) // BLOCK)
    return (
        tape.context.buffer(f"{name}.scales", (rows,), "fp32", f"{name} scales, dequantised"),
        tape.context.buffer(f"{name}.shifted", (rows,), "fp32", f"{name} scales, with their mean"),
    )
