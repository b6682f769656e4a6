"""Low-rank adapters beside a linear, as PEFT runs them (peft tuners/lora/layer.py, Linear.forward)."""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import WeightGrad
from ullage.model.graph import Op, Param


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
    wide = tape.cast(source, dtype, f"{low.name}.input")
    dropped = _dropout(tape, wide, f"{low.name}.dropped") if adapter["dropout"] else wide
    rows = source.dims[: len(source.dims) - len(low.dims) + 1]
    inner = _project(tape, low, dtype, dropped, Value(f"{low.name}.out", (*rows, low.dims[0]), dtype))
    outer = _project(tape, high, dtype, inner, Value(f"{high.name}.out", output.dims, dtype))
    scaled = tape.scale(outer, f"{high.name}.scaled")
    together = promote(result.dtype, scaled.dtype)
    name = output.name if together == result.dtype else f"{output.name}.wide"
    total = tape.add(result, scaled, Value(name, output.dims, together), f"{op.name} output")
    made = tape.cast(total, result.dtype, output.name)
    tape.hold(source, wide)
    return made


def _dropout(tape: Tape, source: Value, name: str) -> Value:
    dtype = "bool" if on_cuda(tape.context, "dropout mask") else source.dtype
    mask = tape.context.buffer(f"{name}.mask", source.dims, dtype, "dropout mask")
    return tape.emit(name, (source,), Value(name, source.dims, source.dtype), beside=(mask,), saves=(mask.name,))


def _project(tape: Tape, param: Param, dtype: str, source: Value, output: Value) -> Value:
    """F.linear with an adapter: its input is saved, and under autocast a copy of the adapter in the compute type."""
    compute = tape.context.compute if tape.context.autocast else dtype
    weight = tape.context.weight(param.name, param.dims, dtype)
    cast = tape.cast(source, compute, f"{param.name}.{compute}.input")
    made = Value(output.name, output.dims, compute)
    if compute == dtype:
        return tape.emit(
            param.name,
            (cast,),
            made,
            saves=(cast,),
            weights=(WeightGrad(weight.param, weight.numel, dtype, fusable=True),),
            view_grads=(cast,),
            serves={cast.name: (param.name,)},
        )
    copy = Value(f"{param.name}.{compute}", param.dims, compute)
    tape.emit(copy.name, (), copy, what=f"autocast copy of {param.name}", weights=(weight,), caches=(copy.name,))
    return tape.emit(
        param.name,
        (cast, copy),
        made,
        saves=(cast, copy),
        view_grads=(cast,),
        serves={cast.name: (copy.name,), copy.name: (cast.name,)},
    )
