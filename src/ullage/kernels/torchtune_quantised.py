"""Linears whose frozen weight torchtune keeps as torchao's NF4Tensor (torchtune modules/low_precision/nf4_linear.py, modules/peft/lora.py).

Source: torchao quantization/quantize_/workflows/nf4/nf4_tensor.py, ``LinearNF4`` and ``get_original_weight``.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.errors import Unsupported
from ullage.job.adapted import is_adapted
from ullage.kernels import transformers_adapters as adapters
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer
from ullage.kernels.transformers_quantised import OP
from ullage.model.graph import Dim, Op


def linear(tape: Tape, op: Op) -> Value:
    """Makes the whole weight for each of its two matmuls and keeps nothing of its input."""
    tape.module = op.module
    weight, *others = adapters.base(op)
    if others:
        raise Unsupported("is not modelled with biases in torchtune", key="lora.base", value=str(weight.elements))
    source = tape[op.inputs[0]]
    output = tape.like(op.outputs[0], source.dtype)
    made = replace(output, name=f"{output.name}.base") if is_adapted(op) else output
    whole = _dequantised(tape, op.name, weight.dims, source.dtype)
    tape.emit(op.name, (source,), made, what=f"{op.name} output", scratch=whole, backward_scratch=whole, op=OP)
    return adapters.added(tape, op, source, made, output) if made is not output else made


def _dequantised(tape: Tape, name: str, dims: tuple[Dim, ...], dtype: str) -> tuple[Buffer, ...]:
    """The weight, and where nothing is compiled what its frame names beside it: of each half the indices into the table of levels as
    64-bit integers, the levels, and those times their scales."""
    context = tape.context
    whole = context.buffer(f"{name}.dequantised", dims, dtype, f"{name} weight, dequantised")
    if context.compile:
        return (whole,)
    numel = context.numel(dims)
    indices = context.buffer(f"{name}.indices", (numel // 2,), "int64", f"{name} indices of levels", 2)
    levels = context.buffer(f"{name}.levels", (numel // 2,), dtype, f"{name} levels", 2)
    scaled = context.buffer(f"{name}.scaled", (numel // 2,), dtype, f"{name} levels times their scales", 2)
    return whole, indices, levels, scaled
