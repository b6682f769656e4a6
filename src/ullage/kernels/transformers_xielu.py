"""xIELU (arXiv 2411.13010) in transformers (activations.py, XIELUActivation): its Python code, or the kernel of the xielu package where
that is installed and nothing is compiled."""

from __future__ import annotations

from ullage.job.widened import XIELU_CUDA
from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value, promote
from ullage.model.graph import Op


def xielu(tape: Tape, op: Op) -> Value:
    """where(x > 0, p x^2 + beta x, (expm1(min(x, eps)) - x) n + beta x), with p and n made of the parameters by softplus.

    The parameters have a dimension, so that their type promotes x's; beta and eps have none.
    """
    tape.module = op.module
    x = tape[op.inputs[0]]
    if tape.context.option(XIELU_CUDA) and not tape.context.compile:
        return _kernel(tape, op, x)
    widens = tape.context.autocast and on_cuda(tape.context, "autocast of expm1")
    slopes = [_slope(tape, op, at, widens=widens) for at in (0, 1)]
    positive = Value(f"{op.name}.positive", x.dims, "bool")
    tape.emit(positive.name, (), positive, what="where x is above zero")
    dtype = promote(x.dtype, slopes[0].dtype)
    above = _above(tape, op, x, slopes[0], dtype)
    below = _below(tape, op, x, slopes[1], dtype, widens=widens)
    output = tape.like(op.outputs[0], promote(above.dtype, below.dtype))
    branches = (above, below, positive)
    tape.emit(output.name, branches, output, what="xielu output", saves=(positive,), no_grad=(positive,))
    tape.hold(x, *slopes)
    return output


def _kernel(tape: Tape, op: Op, x: Value) -> Value:
    """One node: saves x and its parameters in x's type, and gives x's type (XieLUFunction)."""
    slopes = []
    for param in op.params[:2]:
        weight = tape.weight(param.name, param.dims)
        cast = Value(f"{param.name}.cast", param.dims, x.dtype)
        slopes.append(tape.emit(cast.name, (), cast, weights=(weight,)))
    return tape.emit(op.name, (x, *slopes), tape.like(op.outputs[0], x.dtype), what="xielu output", saves=(x, *slopes))


def _slope(tape: Tape, op: Op, at: int, *, widens: bool) -> Value:
    """softplus of a parameter, and beta added to the second's."""
    param = op.params[at]
    dtype = "fp32" if widens else tape.weight_dtype
    slope = Value(f"{param.name}.softplus", param.dims, dtype)
    tape.emit(slope.name, (), slope, weights=(tape.weight(param.name, param.dims),))
    if not at:
        return slope
    return tape.emit(
        f"{slope.name}.shifted", (slope,), Value(f"{slope.name}.shifted", param.dims, dtype), passes=(slope,)
    )


def _above(tape: Tape, op: Op, x: Value, slope: Value, dtype: str) -> Value:
    """(p x) x + beta x."""
    name = f"{op.name}.above"
    scaled = tape.times(slope, x, Value(f"{name}.scaled", x.dims, dtype))
    square = tape.times(scaled, x, Value(f"{name}.square", x.dims, dtype))
    linear = tape.scale(x, f"{name}.linear")
    return tape.add(square, linear, Value(name, x.dims, dtype))


def _below(tape: Tape, op: Op, x: Value, slope: Value, dtype: str, *, widens: bool) -> Value:
    """(expm1(min(x, eps)) - x) n + beta x."""
    name = f"{op.name}.below"
    bounded = _bounded(tape, x, f"{name}.bounded")
    if widens:
        bounded = tape.cast(bounded, "fp32", f"{name}.bounded32")
    power = Value(f"{name}.expm1", x.dims, bounded.dtype)
    plus_one = (tape.scratch(f"{name}.expm1.plus_one", power),)
    tape.emit(power.name, (bounded,), power, saves=(power,), backward_scratch=plus_one)
    less = Value(f"{name}.less", x.dims, power.dtype)
    tape.emit(less.name, (power, x), less, passes=(power,))
    curved = tape.times(less, slope, Value(f"{name}.curved", x.dims, promote(less.dtype, slope.dtype)))
    linear = tape.scale(x, f"{name}.linear")
    return tape.add(curved, linear, Value(name, x.dims, promote(curved.dtype, dtype)))


def _bounded(tape: Tape, x: Value, name: str) -> Value:
    """min(x, eps): its backward gives half of the gradient where the two are equal, and none where x is above."""
    masks = (tape.scratch(f"{name}.{one}", x, "bool") for one in ("equal", "above"))
    half = tape.scratch(f"{name}.half", x)
    return tape.emit(name, (x,), Value(name, x.dims, x.dtype), saves=(x,), backward_scratch=(half, *masks))
