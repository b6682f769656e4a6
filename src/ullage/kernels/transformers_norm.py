"""Norms of transformers' models, as their eager code computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Buffer, Fit
from ullage.model.graph import Op, Param


def norm(tape: Tape, op: Op) -> Value:
    source = tape[op.inputs[0]]
    tape.module = op.module
    if op.attrs.get("per_head") is False:  # over all heads of a token at once
        source = replace(source, dims=(*source.dims[:2], tape.context.numel(source.dims[2:])))
    usual = layer_norm if op.attrs["norm"] == "layernorm" else rms
    made = _OWN.get(tape.family, usual)(tape, op, source)
    return tape.define(replace(made, name=op.outputs[0].name, dims=op.outputs[0].dims))


def rms(tape: Tape, op: Op, source: Value) -> Value:
    """LlamaRMSNorm: fp32 inside, back in the input's type before the weight (models/llama/modeling_llama.py)."""
    wide, variance = normalised(tape, op.name, source)
    narrow = tape.cast(wide, source.dtype, f"{op.name}.narrow")
    output = tape.like(op.outputs[0], promote(source.dtype, tape.weight_dtype))
    if op.params:
        param = op.params[0]
        tape.mul_weight(narrow, tape.weight(param.name, param.dims), output, f"{op.name} output")
    else:
        tape.view(narrow, output.name)
    tape.hold(wide, variance, source)
    return tape.define(output)


def wide_rms(tape: Tape, op: Op, source: Value) -> Value:
    """Olmo2RMSNorm: the weight, in its own type, times the fp32 tensor, then back (models/olmo2/modeling_olmo2.py)."""
    wide, variance = normalised(tape, op.name, source)
    param = op.params[0]
    scaled = _scaled(tape, op, source)
    tape.mul_weight(wide, tape.weight(param.name, param.dims), scaled, f"{op.name} output")
    output = tape.cast(scaled, source.dtype, op.outputs[0].name)
    tape.hold(wide, variance, source)
    return output


def _stream_rms(tape: Tape, op: Op, source: Value) -> Value:
    """T5LayerNorm: the stream in its own type times the root in fp32, cast to the weight's type where that has 16 bits
    (models/t5/modeling_t5.py)."""
    wide = tape.cast(source, "fp32", f"{op.name}.fp32")
    variance = _mean_square(tape, op.name, wide)
    normalised = _over_root(tape, op.name, source, variance)
    param = op.params[0]
    dtype = tape.weight_dtype
    narrow = normalised if dtype == "fp32" else tape.cast(normalised, dtype, f"{op.name}.narrow")
    output = tape.like(op.outputs[0], promote(narrow.dtype, dtype))
    tape.mul_weight(narrow, tape.weight(param.name, param.dims), output, f"{op.name} output")
    tape.hold(narrow, variance, source)
    return output


def _gemma(tape: Tape, op: Op, source: Value) -> Value:
    """Gemma's: times (1 + weight) in fp32, then back (models/gemma2/modeling_gemma2.py)."""
    wide, _ = normalised(tape, op.name, source)
    param = op.params[0]
    name = f"{op.name}.one_plus"
    shifted = Value(name, param.dims, "fp32")
    if tape.weight_dtype != "fp32":
        weight = _weight32(tape, op)
        tape.emit(name, (weight,), shifted, passes=(weight,))
    else:
        tape.emit(name, (), shifted, weights=(tape.weight(param.name, param.dims),))
    output = tape.cast(_times(tape, op, wide, shifted, source), source.dtype, op.outputs[0].name)
    tape.hold(source)
    return output


def _centred(tape: Tape, op: Op, source: Value) -> Value:
    """CohereLayerNorm: in fp32, the mean subtracted twice, without a bias (models/cohere/modeling_cohere.py)."""
    wide = tape.cast(source, "fp32", f"{op.name}.fp32")
    mean = tape.emit(f"{op.name}.mean", (wide,), Value(f"{op.name}.mean", (*wide.rows, 1), "fp32"))
    variance = _mean_square(tape, op.name, _less(tape, wide, mean, f"{op.name}.deviation"))
    normalised = _over_root(tape, op.name, _less(tape, wide, mean, f"{op.name}.centred"), variance)
    output = tape.cast(_times_weight32(tape, op, normalised, source), source.dtype, op.outputs[0].name)
    tape.hold(mean, variance, source)
    return output


def _weight_in_fp32(tape: Tape, op: Op, source: Value) -> Value:
    """HeliumRMSNorm: the weight's copy in fp32 times the fp32 tensor, then back (models/helium/modeling_helium.py)."""
    wide, variance = normalised(tape, op.name, source)
    output = tape.cast(_times_weight32(tape, op, wide, source), source.dtype, op.outputs[0].name)
    tape.hold(wide, variance, source)
    return output


def _one_plus(tape: Tape, op: Op, source: Value) -> Value:
    """NemotronLayerNorm1P: torch's layer norm of 1 + weight, a tensor that it saves. Under autocast it casts all that it is given into the
    compute type, where torch's own runs in fp32 (models/nemotron/modeling_nemotron.py)."""
    weight, bias = op.params
    compute = tape.context.compute
    shifted = Value(f"{op.name}.one_plus", weight.dims, tape.weight_dtype)
    tape.emit(shifted.name, (), shifted, weights=(tape.weight(weight.name, weight.dims),))
    if not (tape.context.autocast and on_cuda(tape.context, "autocast of Nemotron's norm")):
        output = Value(op.outputs[0].name, source.dims, tape.weight_dtype)
        return _native(tape, op, source, output, copies=(shifted,), params=(bias,))
    reads = tape.cast(source, compute, f"{op.name}.{compute}")
    copies = [tape.cast(shifted, compute, f"{shifted.name}.{compute}")]
    if tape.weight_dtype != compute:
        name = f"{op.name}.bias.{compute}"
        grad = tape.weight(bias.name, bias.dims)
        copies.append(tape.emit(name, (), Value(name, bias.dims, compute), weights=(grad,)))
    output = Value(op.outputs[0].name, source.dims, compute)
    return _native(tape, op, reads, output, copies=tuple(copies), params=(bias,) if len(copies) == 1 else ())


# -- parts


def normalised(tape: Tape, name: str, source: Value) -> tuple[Value, Value]:
    """x * rsqrt(mean(x^2) + eps) in fp32, and the mean square, which the frame names to its end."""
    wide = tape.cast(source, "fp32", f"{name}.fp32")
    variance = _mean_square(tape, name, wide)
    return _over_root(tape, name, wide, variance), variance


def _mean_square(tape: Tape, name: str, wide: Value) -> Value:
    two = (tape.scratch(f"{name}.pow", wide), tape.scratch(f"{name}.factor", wide))
    square = tape.emit(
        f"{name}.square", (wide,), Value(f"{name}.square", wide.dims, "fp32"), saves=(wide,), backward_scratch=two
    )
    return tape.emit(f"{name}.variance", (square,), Value(f"{name}.variance", (*wide.rows, 1), "fp32"))


def _over_root(tape: Tape, name: str, value: Value, variance: Value) -> Value:
    """value * rsqrt(variance + eps)."""
    shifted = tape.emit(
        f"{name}.shifted", (variance,), Value(f"{name}.shifted", variance.dims, "fp32"), passes=(variance,)
    )
    root = Value(f"{name}.rsqrt", variance.dims, "fp32")
    tape.emit(root.name, (shifted,), root, saves=(root,), backward_scratch=_two(tape, root))
    out = Value(f"{name}.normalised", value.dims, "fp32")
    product = tape.scratch(f"{name}.product32", out)
    fits = () if value.dtype == "fp32" else (Fit(value.name, tape.scratch(f"{name}.grad32", out)),)
    return tape.emit(out.name, (value, root), out, saves=(value, root), backward_scratch=(product,), fits=fits)


def _two(tape: Tape, value: Value) -> tuple[Buffer, Buffer]:
    return tape.scratch(f"{value.name}.cube", value), tape.scratch(f"{value.name}.half", value)


def _less(tape: Tape, value: Value, mean: Value, name: str) -> Value:
    """value - mean: the mean's gradient is a whole tensor before it is summed."""
    negative = (tape.scratch(f"{name}.negative", value),)
    out = Value(name, value.dims, value.dtype)
    return tape.emit(name, (value, mean), out, passes=(value,), backward_scratch=negative)


def _weight32(tape: Tape, op: Op) -> Value:
    """The weight's copy in fp32."""
    param = op.params[0]
    name = f"{op.name}.weight32"
    return tape.emit(name, (), Value(name, param.dims, "fp32"), weights=(tape.weight(param.name, param.dims),))


def _times_weight32(tape: Tape, op: Op, wide: Value, source: Value) -> Value:
    """An fp32 tensor times the weight in fp32, of which a copy is made where it has another type."""
    param = op.params[0]
    if tape.weight_dtype != "fp32":
        return _times(tape, op, wide, _weight32(tape, op), source)
    scaled = _scaled(tape, op, source)
    return tape.mul_weight(wide, tape.weight(param.name, param.dims), scaled, f"{op.name} output")


def _times(tape: Tape, op: Op, wide: Value, weight: Value, source: Value) -> Value:
    """An fp32 tensor times an fp32 copy of the weight, both saved; the copy's gradient is a whole product before it is summed."""
    scaled = _scaled(tape, op, source)
    product = (tape.scratch(f"{op.name}.product", scaled),)
    what = f"{op.name} output" if scaled.name == op.outputs[0].name else ""
    serves = {wide.name: (weight.name,), weight.name: (wide.name,), product[0].name: (weight.name,)}
    return tape.emit(
        scaled.name, (wide, weight), scaled, what=what, saves=(wide, weight), backward_scratch=product, serves=serves
    )


def _scaled(tape: Tape, op: Op, source: Value) -> Value:
    """What is cast back into the source's type: the norm's output itself where that is fp32."""
    return Value(op.outputs[0].name if source.dtype == "fp32" else f"{op.name}.scaled", source.dims, "fp32")


def _fp32_layer_norm(tape: Tape, op: Op, source: Value) -> Value:
    """OlmoLayerNorm: up to fp32, torch's layer norm without parameters, back (models/olmo/modeling_olmo.py)."""
    wide = tape.cast(source, "fp32", f"{op.name}.fp32")
    made = _native(tape, op, wide, _scaled(tape, op, source))
    tape.hold(source)
    return tape.cast(made, source.dtype, op.outputs[0].name)


def layer_norm(tape: Tape, op: Op, source: Value) -> Value:
    """Autocast runs it in fp32 and so casts input and weights."""
    if not tape.context.autocast:
        return _native(tape, op, source, Value(op.outputs[0].name, source.dims, tape.weight_dtype))
    dtype = "fp32" if on_cuda(tape.context, "autocast of layer norm and softmax") else source.dtype
    reads = tape.cast(source, dtype, f"{op.name}.{dtype}")
    return _native(tape, op, reads, Value(op.outputs[0].name, source.dims, dtype))


def _native(
    tape: Tape,
    op: Op,
    reads: Value,
    output: Value,
    *,
    copies: tuple[Value, ...] = (),
    params: tuple[Param, ...] | None = None,
) -> Value:
    """native_layer_norm: saves its input and two statistics a row. copies: what stands in the place of parameters; params: the others."""
    kept = "fp32" if on_cuda(tape.context, "layer norm statistics") else output.dtype
    statistics = tuple(
        tape.context.buffer(f"{op.name}.{which}", (*reads.rows, 1), kept, f"{op.name} {which}")
        for which in ("mean", "rstd")
    )
    return tape.emit(
        op.name,
        (reads, *copies),
        output,
        what=f"{op.name} output",
        beside=statistics,
        saves=(reads, *copies, *(one.name for one in statistics)),
        weights=tuple(tape.weight(param.name, param.dims) for param in (op.params if params is None else params)),
    )


_OWN: Mapping[str, Callable[[Tape, Op, Value], Value]] = {
    "cohere": _centred,
    "cohere2": _centred,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt_oss": wide_rms,
    "helium": _weight_in_fp32,
    "nemotron": _one_plus,
    "olmo": _fp32_layer_norm,
    "olmo2": wide_rms,
    "olmo3": wide_rms,
    "qwen3_5_moe_text": _gemma,
    "qwen3_5_text": _gemma,
    "qwen3_next": _gemma,
    "t5": _stream_rms,
}
"""Models whose norm is another than torch's layer norm or Llama's RMSNorm."""
