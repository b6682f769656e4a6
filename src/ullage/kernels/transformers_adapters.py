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


def added(tape: Tape, op: Op, source: Value, result: Value, output: Value, prefix: str = "") -> Value:
    """result + B(A(dropout(input))) x scaling, in the type of ``result``. The input is cast to the adapters' type, for each linear anew;
    both are named to the end. prefix: of names, where one linear runs several times."""
    wide = tape.cast(source, _dtype(op), f"{prefix}{op.params[-2].name}.cast")
    scaled = _scaled(tape, op, wide, output, prefix)
    total = _sum(tape, op, result, scaled, output)
    made = tape.cast(total, result.dtype, output.name)
    tape.hold(source, wide)
    return made


def added_to_quantised(tape: Tape, op: Op, source: Value, result: Value, output: Value, prefix: str = "") -> Value:
    """The same beside a quantised linear (tuners/lora/bnb.py): under autocast nothing is cast here, else what is added is."""
    autocast = tape.context.autocast
    wide = source if autocast else tape.cast(source, _dtype(op), f"{prefix}{op.params[-2].name}.cast")
    scaled = _scaled(tape, op, wide, output, prefix)
    if not autocast:
        scaled = tape.cast(scaled, result.dtype, f"{prefix}{op.params[-1].name}.narrow")
    made = _sum(tape, op, result, scaled, output)
    tape.hold(source, wide, scaled)
    return made


def _dtype(op: Op) -> str:
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    return str(adapter["dtype"])


def _scaled(tape: Tape, op: Op, wide: Value, output: Value, prefix: str) -> Value:
    """B(A(dropout(input))) x scaling."""
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    low, high = op.params[-2:]
    dropped = wide
    if adapter["dropout"]:
        dropped = dropout(tape, wide, Value(f"{prefix}{low.name}.dropped", wide.dims, wide.dtype))
    rows = wide.dims[: len(wide.dims) - len(low.dims) + 1]
    inner = _multiplied(tape, low, _dtype(op), dropped, (*rows, low.dims[0]), prefix)
    outer = _multiplied(tape, high, _dtype(op), inner, output.dims, prefix)
    return tape.scale(outer, f"{prefix}{high.name}.scaled")


def _sum(tape: Tape, op: Op, result: Value, scaled: Value, output: Value) -> Value:
    together = promote(result.dtype, scaled.dtype)
    name = output.name if together == result.dtype else f"{output.name}.wide"
    return tape.add(result, scaled, Value(name, output.dims, together), f"{op.name} output")


def _multiplied(tape: Tape, param: Param, dtype: str, source: Value, dims: tuple[Dim, ...], prefix: str) -> Value:
    made = Value(f"{prefix}{param.name}.out", dims, tape.context.compute if tape.context.autocast else dtype)
    return matmul(tape, f"{prefix}{param.name}", source, [(param.name, param.dims)], made, dtype=dtype)
