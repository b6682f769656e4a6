"""torchtune's layer code in bf16 (pytorch/torchtune modules/transformer.py, attention.py, rms_norm.py, feed_forward.py).

Eager, each op saves what its autograd node saves. ``compile: true`` compiles each layer (training/_compile.py); attention with
FlexAttention stays outside (modules/attention_utils.py, compile_friendly_flex_attention), which cuts a layer into graphs: the norm, the
projections with their rotary embedding, the output projection, and residual with the MLP. Their partitioner saves the inputs of each
graph and of each matmul: the layer's input, the norm's output, q, k, v, the attention's output and statistics, the output projection,
the second norm's output, gate, up and their product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ullage.errors import Unsupported
from ullage.kernels import (
    torchtune_attention,
    torchtune_loss,
    torchtune_quantised,
    transformers_linear,
    transformers_mlp,
)
from ullage.kernels.eager import Tape, Value
from ullage.kernels.lowering import kernel_of, refuse_family
from ullage.kernels.step import Buffer, Context, Segment, Step
from ullage.kernels.transformers_quantised import is_quantised
from ullage.model.graph import Block, Op

Emit = Callable[[Tape, Op], object]


FAMILIES = frozenset({"gemma", "gemma2", "gpt", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Models that it has a builder for (torchtune/models); Llama 4's, with its norms without a weight, is not modelled."""


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    refuse_family(block, context, FAMILIES)
    if context.autocast:
        raise Unsupported(
            "torchtune trains in one type", key="precision", value="mixed with autocast", remedy="use bf16 or fp32"
        )
    if any(op.kind == "activation" and not op.attrs["glu"] for op in block.ops):
        raise Unsupported("torchtune has no model with an ungated MLP", key="stack", value=context.stack)
    tape = Tape(context, block)
    kernels: Mapping[str, Emit] = {**KERNELS, **(_COMPILED if context.compile and block.role == "layer" else {})}
    for op in block.ops:
        kernel_of(kernels, op, context)(tape, op)
        if op.outputs[0].name == block.output.name and block.role == "layer":
            tape.hold(tape[block.input.name])
    return tuple(tape.steps)


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    raise Unsupported("is not modelled for torchtune", key="recompute", value="selective", remedy="use full or none")


def buffers(context: Context) -> tuple[Buffer, ...]:
    """The rotary cache: cosine and sine in fp32 for every position that the model can have (modules/position_embeddings.py)."""
    if "positions" not in context.sizes:
        return ()
    return (context.buffer("rotary cache", ("positions", "head_dim"), "fp32", "rotary cache"),)


def norm(tape: Tape, op: Op) -> Value:
    """RMSNorm: fp32 inside, saved as the fp32 input, one statistic a row and the bf16 factor of the weight."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    name = op.name
    wide = tape.cast(source, "fp32", f"{name}.fp32")
    rows = (*wide.rows, 1)
    two = (tape.scratch(f"{name}.pow", wide), tape.scratch(f"{name}.factor", wide))
    square = tape.emit(
        f"{name}.square", (wide,), Value(f"{name}.square", wide.dims, "fp32"), saves=(wide,), backward_scratch=two
    )
    root = Value(f"{name}.rsqrt", rows, "fp32")
    tape.emit(root.name, (square,), root, saves=(root,))
    product = (tape.scratch(f"{name}.product32", wide),)
    normalised = Value(f"{name}.normalised", wide.dims, "fp32")
    tape.emit(normalised.name, (wide, root), normalised, saves=(wide, root), backward_scratch=product)
    narrow = tape.cast(normalised, source.dtype, f"{name}.narrow")
    param = op.params[0]
    output = tape.mul_weight(
        narrow, tape.weight(param.name, param.dims), tape.like(op.outputs[0], source.dtype), f"{name} output"
    )
    tape.hold(source)
    return output


def compiled_norm(tape: Tape, op: Op) -> Value:
    """One kernel: keeps its input and one statistic a row; the second norm's input is made again from what the sum before it keeps."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    kept = () if op.name == "post_attention_norm" else (source,)
    root = tape.context.buffer(f"{op.name}.rsqrt", (*source.rows, 1), "fp32", f"{op.name} statistics")
    return tape.emit(
        op.name,
        (source,),
        tape.like(op.outputs[0], source.dtype),
        what=f"{op.name} output",
        beside=(root,),
        saves=(*kept, root.name),
        weights=tuple(tape.weight(param.name, param.dims) for param in op.params),
    )


def residual(tape: Tape, op: Op) -> Value:
    tape.module = ""
    left, right = (tape[name] for name in op.inputs)
    return tape.add(left, right, tape.like(op.outputs[0], tape.context.residual), "residual stream")


def compiled_residual(tape: Tape, op: Op) -> Value:
    """The sum after attention is made again from the output projection and the layer's input, which the second graph keeps."""
    tape.module = ""
    left, right = (tape[name] for name in op.inputs)
    output = tape.like(op.outputs[0], tape.context.residual)
    if op.name != "attention_add":
        return tape.add(left, right, output, "residual stream")
    return tape.emit(op.name, (left, right), output, what="residual stream", saves=(right,), passes=(left, right))


def compiled_mlp(tape: Tape, op: Op) -> Value:
    """silu(gate) * up in one kernel that keeps both."""
    tape.module = op.module
    gate, up = (tape[name] for name in op.inputs)
    return tape.emit(
        op.name, (gate, up), tape.like(op.outputs[0], gate.dtype), what="gated activation", saves=(gate, up)
    )


def linear(tape: Tape, op: Op) -> Value:
    if op.name == "lm_head":
        return torchtune_loss.head(tape, op)
    if is_quantised(op):
        return torchtune_quantised.linear(tape, op)
    return transformers_linear.linear(tape, op)


KERNELS: Mapping[str, Emit] = {
    "embedding": torchtune_attention.embedding,
    "norm": norm,
    "linear": linear,
    "rope": torchtune_attention.rope,
    "attention": torchtune_attention.attention,
    "activation": transformers_mlp.activation,
    "residual": residual,
    "loss": torchtune_loss.loss,
}
_COMPILED: Mapping[str, Emit] = {
    "norm": compiled_norm,
    "rope": torchtune_attention.compiled_rope,
    "activation": compiled_mlp,
    "residual": compiled_residual,
}
