"""Norms of transformers' models, as their eager code computes them."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Buffer
from ullage.model.graph import Op

_GEMMA = frozenset({"gemma", "gemma2", "gemma3_text"})


def norm(tape: Tape, op: Op) -> Value:
    source = tape[op.inputs[0]]
    tape.module = op.module
    if op.attrs["norm"] == "layernorm":
        return layer_norm(tape, op, source)
    if tape.family in _GEMMA:
        return _gemma(tape, op, source)
    return _rms(tape, op, source)


def _rms(tape: Tape, op: Op, source: Value) -> Value:
    """LlamaRMSNorm: fp32 inside, back in the input's type before the weight (models/llama/modeling_llama.py)."""
    wide, variance = _normalised(tape, op.name, source)
    narrow = tape.cast(wide, source.dtype, f"{op.name}.narrow")
    output = tape.like(op.outputs[0], promote(source.dtype, tape.weight_dtype))
    if op.params:
        param = op.params[0]
        tape.mul_weight(narrow, tape.weight(param.name, param.dims), output, f"{op.name} output")
    else:
        tape.view(narrow, output.name)
    tape.hold(wide, variance, source)
    return tape.define(output)


def _gemma(tape: Tape, op: Op, source: Value) -> Value:
    """Gemma's: times (1 + weight) in fp32, then back (models/gemma2/modeling_gemma2.py)."""
    wide, _ = _normalised(tape, op.name, source)
    param = op.params[0]
    output = tape.like(op.outputs[0], source.dtype)
    scaled = Value(f"{op.name}.scaled" if source.dtype != "fp32" else output.name, source.dims, "fp32")
    if tape.weight_dtype != "fp32":
        weight = tape.emit(
            f"{op.name}.weight32",
            (),
            Value(f"{op.name}.weight32", param.dims, "fp32"),
            weights=(tape.weight(param.name, param.dims),),
        )
        shifted = tape.emit(
            f"{op.name}.one_plus", (weight,), Value(f"{op.name}.one_plus", param.dims, "fp32"), passes=(weight,)
        )
    else:
        shifted = tape.emit(
            f"{op.name}.one_plus",
            (),
            Value(f"{op.name}.one_plus", param.dims, "fp32"),
            weights=(tape.weight(param.name, param.dims),),
        )
    product = (tape.scratch(f"{op.name}.product", scaled),)
    tape.emit(scaled.name, (wide, shifted), scaled, saves=(wide, shifted), backward_scratch=product)
    if scaled.name != output.name:
        tape.emit(output.name, (scaled,), output, what=f"{op.name} output")
    tape.hold(source)
    return tape.define(output)


def _normalised(tape: Tape, name: str, source: Value) -> tuple[Value, Value]:
    """x * rsqrt(mean(x^2) + eps) in fp32, and the mean square, which the frame names to its end."""
    wide = tape.cast(source, "fp32", f"{name}.fp32")
    rows = (*wide.rows, 1)
    two = (tape.scratch(f"{name}.pow", wide), tape.scratch(f"{name}.factor", wide))
    square = tape.emit(
        f"{name}.square", (wide,), Value(f"{name}.square", wide.dims, "fp32"), saves=(wide,), backward_scratch=two
    )
    variance = tape.emit(f"{name}.variance", (square,), Value(f"{name}.variance", rows, "fp32"))
    shifted = tape.emit(f"{name}.shifted", (variance,), Value(f"{name}.shifted", rows, "fp32"), passes=(variance,))
    root = Value(f"{name}.rsqrt", rows, "fp32")
    tape.emit(root.name, (shifted,), root, saves=(root,), backward_scratch=_two(tape, root))
    out = Value(f"{name}.normalised", wide.dims, "fp32")
    product = (tape.scratch(f"{name}.product32", wide),)
    tape.emit(out.name, (wide, root), out, saves=(wide, root), backward_scratch=product)
    return out, variance


def _two(tape: Tape, value: Value) -> tuple[Buffer, Buffer]:
    return tape.scratch(f"{value.name}.cube", value), tape.scratch(f"{value.name}.half", value)


def layer_norm(tape: Tape, op: Op, source: Value) -> Value:
    """native_layer_norm: saves its input and two fp32 statistics a row. Autocast runs it in fp32 and so casts input and weights."""
    dtype = tape.weight_dtype
    reads = source
    if tape.context.autocast:
        reads = tape.cast(source, "fp32", f"{op.name}.fp32")
        dtype = "fp32"
    output = tape.like(op.outputs[0], dtype)
    statistics = tuple(
        tape.context.buffer(
            f"{op.name}.{which}", (*source.rows, 1), _statistics_dtype(tape, dtype), f"{op.name} {which}"
        )
        for which in ("mean", "rstd")
    )
    tape.emit(
        op.name,
        (reads,),
        output,
        what=f"{op.name} output",
        beside=statistics,
        saves=(reads, *(one.name for one in statistics)),
        weights=tuple(tape.weight(param.name, param.dims) for param in op.params),
    )
    return tape.define(output)


def _statistics_dtype(tape: Tape, dtype: str) -> str:
    """CUDA keeps the statistics in fp32 (layer_norm_kernel.cu, acc_type); CPU in the input's type."""
    return "fp32" if tape.context.device == "cuda" else dtype
