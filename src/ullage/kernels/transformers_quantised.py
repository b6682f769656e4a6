"""Linears whose weight bitsandbytes keeps in four bits, as its autograd function and PEFT's layer around it run them."""

from __future__ import annotations

from dataclasses import replace

from ullage.job.adapted import QUANTISED, is_adapted
from ullage.kernels import transformers_adapters as adapters
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer, Context
from ullage.kernels.transformers_loss import version_of
from ullage.model.graph import Dim, Op

BLOCK = 64
"""Weights that share a scale (nn/modules.py, Params4bit)."""


def is_quantised(op: Op) -> bool:
    return any(param.elements in QUANTISED for param in op.params)


def linear(
    tape: Tape, op: Op, name: str, source: Value, dims: tuple[Dim, ...], output: Value, prefix: str = ""
) -> Value:
    """One Linear4bit, with an adapter beside it where the op has one. output: in the input's type, as Linear4bit gives it."""
    if any(param.elements == "int8" for param in op.params):
        made = replace(output, name=f"{output.name}.base") if is_adapted(op) else output
        base = _linear8bit(tape, name, source, dims, made)
        return adapters.added_to_quantised(tape, op, source, base, output, prefix) if base is not output else base
    if not is_adapted(op):
        return _linear4bit(tape, op, name, source, dims, output)
    base = _linear4bit(tape, op, name, source, dims, replace(output, name=f"{output.name}.base"))
    clone = replace(output, name=f"{output.name}.clone")
    tape.emit(clone.name, (base,), clone, passes=(base,))
    return adapters.added_to_quantised(tape, op, source, clone, output, prefix)


def _linear4bit(tape: Tape, op: Op, name: str, source: Value, dims: tuple[Dim, ...], output: Value) -> Value:
    """Linear4bit.forward (nn/modules.py): the input in the compute type, MatMul4Bit, and back into the input's type.

    MatMul4Bit (autograd/_functions.py) makes the whole weight for each of its matmuls, forward and backward, and saves none of its
    input, which it did before 0.43.2. (backends/cuda/ops.py, gemm_4bit: at most 1536 rows may be multiplied without it, forward alone.)
    """
    cast = tape.cast(source, tape.context.compute, f"{name}.input")
    made = output if output.dtype == cast.dtype else Value(f"{output.name}.narrow", output.dims, cast.dtype)
    whole = [tape.context.buffer(f"{name}.dequantised", dims, cast.dtype, f"{name} weight, dequantised")]
    if tape.context.stack in _IN_FP16 and cast.dtype != "fp16":
        whole.append(tape.context.buffer(f"{name}.dequantised16", dims, "fp16", f"{name} weight, as it was packed"))
    double = any(param.elements == "nf4-double" for param in op.params)
    tape.emit(
        name,
        (cast,),
        made,
        what=f"{name} output",
        saves=(cast,) if keeps_inputs(tape.context) else (),
        scratch=(*whole, *scales(tape, name, dims)) if double else tuple(whole),
        backward_scratch=tuple(whole),
        op=OP,
    )
    return tape.cast(made, output.dtype, output.name)


def _linear8bit(tape: Tape, name: str, source: Value, dims: tuple[Dim, ...], output: Value) -> Value:
    """Linear8bitLt.forward: MatMul8bitLt (autograd/_functions.py), whose node keeps the input as it came, for nothing.

    Forward: an fp16 copy of the input, its absolute values and where they are outliers, the 8-bit input (backends/cuda/ops.py,
    int8_vectorwise_quant); then the product in 32 bits, in fp16, and in the input's type. Backward: the whole weight in the input's type.
    Left out: columns with an outlier, which the values decide.
    """
    context = tape.context
    narrow = [context.buffer(f"{name}.int8", source.dims, "int8", f"{name} input in 8 bits")]
    if source.dtype != "fp16":
        narrow.append(context.buffer(f"{name}.fp16", source.dims, "fp16", f"{name} input in fp16"))
    looked = [
        context.buffer(f"{name}.magnitudes", source.dims, "fp16", f"{name} input, absolute values"),
        context.buffer(f"{name}.outliers", source.dims, "bool", f"{name} input, where outliers are"),
    ]
    # what is looked at is gone before the product is there
    quantised_input = Value(f"{name}.quantised", source.dims, "int8")
    tape.emit(quantised_input.name, (source,), quantised_input, no_grad=(source,), scratch=(*narrow[1:], *looked))
    product = [context.buffer(f"{name}.product", output.dims, "int32", f"{name} product in 32 bits")]
    if output.dtype != "fp16":
        product.append(context.buffer(f"{name}.product16", output.dims, "fp16", f"{name} product in fp16"))
    whole = context.buffer(f"{name}.dequantised", dims, source.dtype, f"{name} weight, dequantised")
    made = tape.emit(
        name,
        (source, quantised_input),
        output,
        what=f"{name} output",
        saves=(source,),
        no_grad=(quantised_input,),
        scratch=tuple(product),
        backward_scratch=(whole,),
        op="matmul_8bit",
    )
    return made


INPUTS_UNTIL = {"litgpt": "2024-12-28"}
"""The day of bitsandbytes after 0.43.1 ("delete useless buffered activation", #1270) by stack: litgpt asked for 0.42.0 until then.
transformers 4.43 came out on the same day as 0.43.2."""
OP = "matmul_4bit"
"""What policies by op know one by."""
_IN_FP16 = frozenset({"litgpt"})
"""Stacks that pack weights out of fp16, which they become again before they are cast (lightning.fabric's plugin)."""


def keeps_inputs(context: Context) -> bool:
    """Whether the bitsandbytes of the stack's day saved the input of each linear."""
    if context.stack == "transformers":
        return version_of(context) < (4, 43)
    until = INPUTS_UNTIL.get(context.stack, "")
    return (context.version or until) < until


def scales(tape: Tape, name: str, dims: tuple[Dim, ...]) -> tuple[Buffer, Buffer]:
    """The scales in fp32, before and after their mean is added."""
    rows = -(-tape.context.numel(dims) // BLOCK)
    return (
        tape.context.buffer(f"{name}.scales", (rows,), "fp32", f"{name} scales, dequantised"),
        tape.context.buffer(f"{name}.shifted", (rows,), "fp32", f"{name} scales, with their mean"),
    )
