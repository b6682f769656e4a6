"""DoRA beside a linear, as PEFT runs it (peft tuners/lora/dora.py, DoraLinearLayer.forward; variants.py, DoraLinearVariant.forward).

Every forward makes the whole update B A, by sending an identity matrix through both, and the norm of each row of the weight with it,
none of which has a gradient; the base's output is kept for the magnitude's gradient. With dropout the base is multiplied once more,
with the dropped input, by a copy of the weight in the input's type, which is kept for the input's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.frozen import FrozenMap
from ullage.job.adapted import QUANTISED
from ullage.kernels.eager import Tape, Value, promote
from ullage.model.graph import Dim, Op, Param


def added(
    tape: Tape, op: Op, source: Value, result: Value, update: Value, output: Value, prefix: str, *, again: bool
) -> Value:
    """result + (m / norm - 1) base + (m / norm) update, in the wider of their types.

    source: of the adapters, as they read it. result: the base's output. update: B(A(source)). again: whether ``source`` was dropped, so
    that the base's output of it is another.
    """
    magnitude, low, high = op.params[-3:]
    name = f"{prefix}{magnitude.name}"
    held = [*_norm(tape, op, source, low, high, name)]
    norm = held[-1]
    weights = (tape.context.weight(magnitude.name, magnitude.dims, _seen_as(op)),)
    scale = Value(f"{name}.scale", norm.dims, norm.dtype)
    tape.emit(scale.name, (norm,), scale, saves=(norm,), no_grad=(norm,), weights=weights)
    base = result
    if again:
        base = _multiplied(tape, source, held[0], Value(f"{name}.base", output.dims, _type(tape, source)))
    elif len(_base(op)) > 1:
        base = tape.scale(result, f"{name}.unbiased")
    lesser = tape.scale(scale, f"{name}.scale_less_one")
    first = _times(tape, lesser, base, f"{name}.of_base", output.dims)
    second = _times(tape, scale, update, f"{name}.of_update", output.dims)
    third = tape.scale(second, f"{name}.scaled")
    both = promote(first.dtype, third.dtype)
    total = tape.add(first, third, Value(f"{name}.change", output.dims, both))
    made = promote(result.dtype, total.dtype)
    summed = tape.add(
        result,
        total,
        Value(output.name if made == result.dtype else f"{output.name}.wide", output.dims, made),
        f"{op.name} output",
    )
    tape.hold(*held, base, update)
    return summed


def _base(op: Op) -> tuple[Param, ...]:
    return op.params[:-3]


def _seen_as(op: Op) -> str:
    """The type of the adapters as the layer code sees them."""
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    return str(adapter["dtype"])


def _type(tape: Tape, source: Value) -> str:
    return tape.context.compute if tape.context.autocast else source.dtype


def _norm(tape: Tape, op: Op, source: Value, low: Param, high: Param, name: str) -> Iterator[Value]:
    """What the frame names to its end: the weight and the update in the input's type, and the norms, one a row."""
    context = tape.context
    inner: tuple[Dim, ...] = low.dims[1:]
    outer: tuple[Dim, ...] = high.dims[:-1]
    runs = _type(tape, source)
    seen = _seen_as(op)
    as_seen = (context.buffer(f"{name}.eye32", (*inner, *inner), seen),) if seen != runs else ()
    eye = Value(f"{name}.eye", (*inner, *inner), runs)
    tape.emit(eye.name, (), eye, what="identity matrix for DoRA's update", scratch=as_seen)
    through = tape.emit(f"{name}.A", (eye,), Value(f"{name}.A", (*inner, low.dims[0]), runs))
    update = tape.emit(
        f"{name}.BA", (through,), Value(f"{name}.BA", (*outer, *inner), runs), what="DoRA's whole update"
    )
    update = tape.cast(update, source.dtype, f"{name}.BA.cast")
    weight = Value(f"{name}.weight", (*outer, *inner), source.dtype)
    if op.params[0].elements in QUANTISED:
        unpacked = context.buffer(f"{name}.unpacked", weight.dims, context.compute)
        cast = (unpacked,) if source.dtype != context.compute else ()
        tape.emit(weight.name, (), weight, what=f"{op.name} weight, dequantised", scratch=cast)
    elif tape.weight_dtype != source.dtype:
        tape.emit(weight.name, (), weight, what=f"{op.name} weight in the adapters' type")
    else:
        weight = Value(f"{name}.weight", (), source.dtype)
        tape.emit(weight.name, (), weight)
    two = tuple(context.buffer(f"{name}.{one}", (*outer, *inner), source.dtype) for one in ("scaled", "whole"))
    norm = Value(f"{name}.norm", outer, source.dtype)
    tape.emit(norm.name, (update, weight), norm, what="norm of each row", scratch=two)
    yield from (weight, eye, through, update, norm)


def _multiplied(tape: Tape, source: Value, weight: Value, output: Value) -> Value:
    """F.linear with the weight's copy, which under autocast is copied into the compute type."""
    compute = output.dtype
    narrow = tape.cast(source, compute, f"{output.name}.input")
    copy = weight if weight.dtype == compute or not weight.dims else tape.cast(weight, compute, f"{output.name}.weight")
    return tape.emit(
        output.name, (narrow, copy), output, saves=(copy,), no_grad=(copy,), view_grads=(narrow,), what="base's output"
    )


def _times(tape: Tape, scale: Value, value: Value, name: str, dims: tuple[Dim, ...]) -> Value:
    """A number a row of the weight times that row of the output: the number's gradient is a whole product before it is summed."""
    out = Value(name, dims, promote(scale.dtype, value.dtype))
    product = tape.scratch(f"{name}.product", out)
    return tape.emit(
        name,
        (scale, value),
        out,
        saves=(scale, value),
        backward_scratch=(product,),
        serves={scale.name: (value.name,), value.name: (scale.name,), product.name: (scale.name,)},
    )
