"""A gated DeltaNet in transformers (models/qwen3_next/modeling_qwen3_next.py), and the gate of the attention beside it.

Two packages stand in the place of its Python code where they are installed: flash-linear-attention in that of the delta rule,
causal-conv1d in that of the convolution (integrations/hub_kernels.py, use_kernel_func_from_hub_with_fallback).
"""

from __future__ import annotations

from ullage.errors import Unsupported
from ullage.kernels import transformers_chunks as chunks
from ullage.kernels import transformers_fla as fla
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Context, Fit
from ullage.kernels.transformers_norm import normalised
from ullage.model.graph import BATCH, SEQ, Dim, Op


def query_gate(tape: Tape, op: Op) -> None:
    """Both halves are views of the projection; the gate is copied, head beside head."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    query, gate = (tape.like(tensor, source.dtype) for tensor in op.outputs)
    view = Value(f"{gate.name}.view", gate.dims, gate.dtype)
    tape.views(source, (query, view))
    tape.emit(gate.name, (view,), gate, what="gate of the attention's output", passes=(view,))


def output_gate(tape: Tape, op: Op) -> Value:
    tape.module = op.module
    context, gate = (tape[name] for name in op.inputs)
    sigmoid = _sigmoid(tape, gate, f"{gate.name}.sigmoid")
    return tape.mul(context, sigmoid, tape.like(op.outputs[0], context.dtype), "attention output, gated")


def _sigmoid(tape: Tape, source: Value, name: str) -> Value:
    made = Value(name, source.dims, source.dtype)
    return tape.emit(name, (source,), made, saves=(made,))


def split(tape: Tape, op: Op) -> None:
    """fix_query_key_value_ordering: the parts of each key head are views; where several value heads share one, they are copied."""
    tape.module = op.module
    joint, rates = (tape[name] for name in op.inputs)
    heads: tuple[Dim, ...] = (BATCH, SEQ, "delta_k_heads")
    context = tape.context
    shared = context.size("delta_heads") // context.size("delta_k_heads")
    values = context.size("delta_v_dim") * shared
    sizes: dict[str, Dim] = {"q": "delta_k_dim", "k": "delta_k_dim", "v": values, "z": values}
    q, k, v, z = (Value(f"{name}.part", (*heads, size), joint.dtype) for name, size in sizes.items())
    b, a = (Value(f"{name}.part", (*heads, shared), rates.dtype) for name in "ba")
    tape.views(joint, (q, k, v, z))
    tape.views(rates, (b, a))
    copied = [_copied(tape, one, shared > 1) for one in (v, z, b, a)]
    joined = tape.like(op.outputs[0], joint.dtype)
    parts = (*(_copied(tape, one, True) for one in (q, k)), copied[0])
    tape.emit(joined.name, parts, joined, what="queries, keys and values, joined", passes=parts)
    tape.hold(*parts)
    for tensor, made in zip(op.outputs[1:], copied[1:], strict=True):
        tape.view(made, tensor.name, tensor.dims)


def _copied(tape: Tape, part: Value, copies: bool) -> Value:
    name = part.name.replace("part", "copy")
    if not copies:
        return tape.view(part, name)
    return tape.emit(name, (part,), Value(name, part.dims, part.dtype), passes=(part,))


def convolution(tape: Tape, op: Op) -> Value:
    """Taps over the tokens of each channel and silu: one kernel that keeps its input, or conv1d over more tokens, of which the last are
    cut off, and silu. Autocast casts both operands of conv1d; the weight is a view, whose copy it does not keep."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    output = tape.like(op.outputs[0], source.dtype)
    (param,) = op.params
    weight = tape.weight(param.name, param.dims)
    if fla.runs_convolution(tape.context):
        return tape.emit(
            op.name, (source,), output, what="output of the convolution", saves=(source,), weights=(weight,)
        )
    wide = tape.cast(source, tape.weight_dtype, f"{op.name}.input")
    weights: tuple[Value, ...] = ()
    if tape.context.autocast and tape.weight_dtype != tape.context.compute:
        copy = Value(f"{param.name}.copy", param.dims, tape.context.compute)
        weights = (tape.emit(copy.name, (), copy, weights=(weight,)),)
    narrow = tape.cast(wide, tape.context.compute, f"{op.name}.narrow")
    taps = tape.context.size(param.dims[-1])
    longer = tape.context.size(SEQ) + taps - 1
    made = Value(f"{op.name}.longer", (BATCH, "delta_qkv", longer), narrow.dtype)
    tape.emit(
        made.name,
        (narrow, *weights),
        made,
        what="output of the convolution",
        saves=(narrow, *weights),
        weights=() if weights else (weight,),
    )
    tape.hold(wide)
    cut = tape.view(made, f"{op.name}.cut", output.dims, copies=True)
    tape.emit(output.name, (cut,), output, what="silu of the convolution's output", saves=(cut,))
    tape.hold(source)
    return output


def rule(tape: Tape, op: Op) -> Value:
    """Queries, keys and values are parts of the convolution's output; beta is a sigmoid, g the log of the decay, in fp32."""
    tape.module = op.module
    _refuse_cuts(tape.context)
    joint, b, a = (tape[name] for name in op.inputs)
    keys: tuple[Dim, ...] = (BATCH, SEQ, "delta_k_heads", "delta_k_dim")
    values = op.outputs[0].dims
    parts = tuple(Value(name, dims, joint.dtype) for name, dims in (("q", keys), ("k", keys), ("v", values)))
    tape.views(joint, parts)
    beta = _sigmoid(tape, b, "beta")
    g = _log_decay(tape, op, a)
    output = tape.like(op.outputs[0], joint.dtype)
    run = fla.rule if fla.runs_rule(tape.context) else chunks.rule
    run(tape, parts, g, beta, output)
    return output


def _refuse_cuts(context: Context) -> None:
    for axis in ("tp", "cp"):
        degree = getattr(context, axis)
        if degree > 1:
            raise Unsupported(
                "is not modelled for a model with layers of gated DeltaNet",
                key=f"layout.{axis}",
                value=degree,
                allowed="1",
                remedy="use data parallelism: ddp, fsdp2 or deepspeed",
            )


def _log_decay(tape: Tape, op: Op, a: Value) -> Value:
    """-exp(A_log) x softplus(a + dt_bias)."""
    bias, log = (tape.weight(param.name, param.dims) for param in op.params)
    heads: tuple[Dim, ...] = ("delta_heads",)
    power = Value("A", heads, "fp32")
    if tape.weight_dtype == "fp32":
        tape.emit(power.name, (), power, saves=(power,), weights=(log,))
    else:
        wide = tape.emit("A_log.fp32", (), Value("A_log.fp32", heads, "fp32"), weights=(log,))
        tape.emit(power.name, (wide,), power, saves=(power,))
    rate = tape.emit("A.negative", (power,), Value("A.negative", heads, "fp32"))
    step = tape.cast(a, "fp32", "a.fp32")
    biased = Value("a.biased", step.dims, "fp32")
    tape.emit(biased.name, (step,), biased, passes=(step,), weights=(bias,), summed=(bias.param,))
    soft = Value("a.softplus", step.dims, "fp32")
    tape.emit(soft.name, (biased,), soft, saves=(biased,))
    return tape.times(rate, soft, Value("g", step.dims, "fp32"), "log of the decay")


def norm(tape: Tape, op: Op) -> Value:
    """Qwen3NextRMSNormGated: fp32 inside, back in the input's type before the weight, times silu of the gate in fp32, back."""
    tape.module = op.module
    source, gate = (tape[name] for name in op.inputs)
    wide, variance = normalised(tape, op.name, source)
    narrow = tape.cast(wide, source.dtype, f"{op.name}.narrow")
    (param,) = op.params
    scaled = Value(f"{op.name}.scaled", source.dims, promote(source.dtype, tape.weight_dtype))
    product = tape.scratch(f"{op.name}.product", scaled)
    fits = (Fit(narrow.name, tape.scratch(f"{op.name}.wide", scaled)),) if scaled.dtype != narrow.dtype else ()
    tape.emit(
        scaled.name,
        (narrow,),
        scaled,
        saves=(narrow,),
        weights=(tape.weight(param.name, param.dims),),
        backward_scratch=(product,),
        fits=fits,
        serves={narrow.name: (param.name,), product.name: (param.name,)},
    )
    tape.hold(wide)
    wide_gate = tape.cast(gate, "fp32", f"{op.name}.gate")
    act = Value(f"{op.name}.silu", gate.dims, "fp32")
    tape.emit(act.name, (wide_gate,), act, saves=(wide_gate,))
    output = tape.like(op.outputs[0], source.dtype)
    gated = Value(output.name if source.dtype == "fp32" else f"{op.name}.gated", source.dims, "fp32")
    made = tape.cast(tape.times(scaled, act, gated), source.dtype, output.name)
    tape.hold(source, variance)
    return made
