"""Low-rank adapters beside a linear, as PEFT runs them (peft tuners/lora/layer.py, Linear.forward)."""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.transformers_attention import dropout
from ullage.kernels.transformers_matmul import matmul
from ullage.model.graph import Dim, Op, Param


def is_adapted(op: Op) -> bool:
    return "lora" in op.attrs


def base(op: Op) -> tuple[Param, ...]:
    """The parameters that are not adapters."""
    return op.params[:-2] if is_adapted(op) else op.params


def added(tape: Tape, op: Op, source: Value, result: Value, output: Value) -> Value:
    """result + B(A(dropout(input))) x scaling, in the type of ``result``. The input is cast to the adapters' type, for each linear anew;
    both are named to the end."""
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    dtype = str(adapter["dtype"])
    low, high = op.params[-2:]
    wide = tape.cast(source, dtype, f"{low.name}.cast")
    dropped = wide
    if adapter["dropout"]:
        dropped = dropout(tape, wide, Value(f"{low.name}.dropped", wide.dims, wide.dtype))
    rows = source.dims[: len(source.dims) - len(low.dims) + 1]
    inner = _multiplied(tape, low, dtype, dropped, (*rows, low.dims[0]))
    outer = _multiplied(tape, high, dtype, inner, output.dims)
    scaled = tape.scale(outer, f"{high.name}.scaled")
    together = promote(result.dtype, scaled.dtype)
    name = output.name if together == result.dtype else f"{output.name}.wide"
    total = tape.add(result, scaled, Value(name, output.dims, together), f"{op.name} output")
    made = tape.cast(total, result.dtype, output.name)
    tape.hold(source, wide)
    return made


def _multiplied(tape: Tape, param: Param, dtype: str, source: Value, dims: tuple[Dim, ...]) -> Value:
    made = Value(f"{param.name}.out", dims, tape.context.compute if tape.context.autocast else dtype)
    return matmul(tape, param.name, source, [(param.name, param.dims)], made, dtype=dtype)
