"""Low-rank adapters beside a linear, as PEFT runs them (peft tuners/lora/layer.py, Linear.forward)."""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.job.adapted import is_adapter
from ullage.kernels import transformers_dora
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.transformers_attention import dropout
from ullage.kernels.transformers_matmul import matmul
from ullage.model.graph import Dim, Op, Param


def base(op: Op) -> tuple[Param, ...]:
    """The parameters that are not adapters."""
    return tuple(param for param in op.params if not is_adapter(param.name))


def added(tape: Tape, op: Op, source: Value, result: Value, output: Value, prefix: str = "") -> Value:
    """result + B(A(dropout(input))) x scaling, in the type of ``result``. The input is cast to the adapters' type, for each linear anew;
    both are named to the end. prefix: of names, where one linear runs several times."""
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    wide = tape.cast(source, str(adapter.get("given", _dtype(op))), f"{prefix}{op.params[-2].name}.cast")
    total = _with_dora(tape, op, wide, result, output, prefix)
    if total is None:
        scaled = _scaled(tape, op, wide, output, prefix)
        total = _sum(tape, op, result, scaled, output)
    made = tape.cast(total, result.dtype, output.name)
    tape.hold(source, wide)
    return made


def added_to_quantised(tape: Tape, op: Op, source: Value, result: Value, output: Value, prefix: str = "") -> Value:
    """The same beside a quantised linear (tuners/lora/bnb.py): under autocast nothing is cast here, else what is added is."""
    autocast = tape.context.autocast
    wide = source if autocast else tape.cast(source, _dtype(op), f"{prefix}{op.params[-2].name}.cast")
    total = _with_dora(tape, op, wide, result, output, prefix)
    if total is not None:
        made = tape.cast(total, result.dtype, output.name)
        tape.hold(source, wide)
        return made
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


def _with_dora(tape: Tape, op: Op, wide: Value, result: Value, output: Value, prefix: str) -> Value | None:
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    if not adapter.get("dora"):
        return None
    dropped = _dropped(tape, op, wide, prefix)
    update = _update(tape, op, dropped, output, prefix)
    again = bool(adapter["dropout"])
    return transformers_dora.added(tape, op, dropped, result, update, output, prefix, again=again)


def _dropped(tape: Tape, op: Op, wide: Value, prefix: str) -> Value:
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    if not adapter["dropout"]:
        return wide
    return dropout(tape, wide, Value(f"{prefix}{op.params[-2].name}.dropped", wide.dims, wide.dtype))


def _scaled(tape: Tape, op: Op, wide: Value, output: Value, prefix: str) -> Value:
    """B(A(dropout(input))) x scaling."""
    outer = _update(tape, op, _dropped(tape, op, wide, prefix), output, prefix)
    return tape.scale(outer, f"{prefix}{op.params[-1].name}.scaled")


def _update(tape: Tape, op: Op, dropped: Value, output: Value, prefix: str) -> Value:
    """B(A(dropped))."""
    low, high = op.params[-2:]
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    if adapter.get("given"):
        dropped = tape.cast(dropped, _dtype(op), f"{prefix}{low.name}.narrow")
    rows = dropped.dims[: len(dropped.dims) - len(low.dims) + 1]
    inner = _multiplied(tape, low, _dtype(op), dropped, (*rows, low.dims[0]), prefix)
    return _multiplied(tape, high, _dtype(op), inner, output.dims, prefix)


def _sum(tape: Tape, op: Op, result: Value, scaled: Value, output: Value) -> Value:
    together = promote(result.dtype, scaled.dtype)
    name = output.name if together == result.dtype else f"{output.name}.wide"
    return tape.add(result, scaled, Value(name, output.dims, together), f"{op.name} output")


def _multiplied(tape: Tape, param: Param, dtype: str, source: Value, dims: tuple[Dim, ...], prefix: str) -> Value:
    made = Value(f"{prefix}{param.name}.out", dims, tape.context.compute if tape.context.autocast else dtype)
    return matmul(tape, f"{prefix}{param.name}", source, [(param.name, param.dims)], made, dtype=dtype)
