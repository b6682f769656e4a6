"""The layer code of Hugging Face transformers, op by op as its eager PyTorch runs it (5.x; 4.x where memory differed).

Closed forms for a Llama layer (u = tokens x hidden x 2 B, g = kv heads / heads, a = MLP width / hidden): bf16 u(10 + 2g + 4a) + 4TH;
fp32 weights under autocast u(15 + 2g + 4a) + 2 x parameters; fp32 2u(8 + 2g + 4a) + 4TH. They fall out of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ullage.kernels import (
    crossing,
    transformers_attention,
    transformers_cut_loss,
    transformers_delta,
    transformers_encoders,
    transformers_frames,
    transformers_latent,
    transformers_linear,
    transformers_loss,
    transformers_mlp,
    transformers_moe,
    transformers_norm,
    transformers_parallel,
    transformers_positions,
    transformers_rope,
    transformers_selective,
    transformers_xielu,
)
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.lowering import kernel_of, module_segments
from ullage.kernels.step import Buffer, Context, Segment, Step
from ullage.model.graph import TARGET, Block, Op

Emit = Callable[[Tape, Op], object]


@dataclass(frozen=True, slots=True)
class LayerCode:
    """The functions that write a block's ops. without_logits: the head and its loss in one. gates_first: act(gate) has run before the
    projection that it multiplies is asked for. joins: the group of an op that is one call with its neighbours; together: writes it."""

    kernels: Mapping[str, Emit]
    without_logits: Callable[[Tape, Op, Op], object]
    gates_first: bool = True
    joins: Callable[[Op], str] | None = None
    together: Callable[[Tape, tuple[Op, ...]], None] | None = None


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    """The steps of a block."""
    return written(block, context, LayerCode(KERNELS, transformers_cut_loss.loss))


def written(block: Block, context: Context, code: LayerCode) -> tuple[Step, ...]:
    """The steps of a block in ``code``. What a frame of the layer code still names when its last op runs is held to there."""
    tape = Tape(context, block)
    products = [op for op in block.ops if op.kind == "activation" and op.attrs["glu"]] if code.gates_first else []
    gated = {op.inputs[1]: op for op in products}
    waiting: list[Op] = []
    group, write = code.joins or joins, code.together or together
    heads = {op.outputs[0].name: op for op in block.ops if transformers_cut_loss.is_cut(tape, op)}
    for op in _called(block, group):
        if waiting and group(op) != group(waiting[0]):
            write(tape, tuple(waiting))
            waiting = []
        if group(op):
            waiting.append(op)
            continue
        if op in heads.values():
            continue
        if op.kind == "loss" and op.inputs[0] in heads:
            code.without_logits(tape, heads[op.inputs[0]], op)
            continue
        kernel = kernel_of(code.kernels, op, context)
        if op.outputs[0].name in gated:
            transformers_mlp.gate(tape, gated[op.outputs[0].name])
        kernel(tape, op)
        transformers_frames.hold(tape, block, op)
    steps = transformers_parallel.told_apart(tape)
    return crossing.told(block, tape, steps) if block.beside or block.lends else steps


def joins(op: Op) -> str:
    """The group of an op that is one call together with its neighbours; "" for an op by itself."""
    if op.kind == "grouped_linear" or (op.kind == "linear" and op.attrs["fused"]):
        return str(op.attrs["group"] or op.name)
    return ""


def together(tape: Tape, ops: tuple[Op, ...]) -> None:
    """Writes the ops of one call."""
    if ops[0].kind == "grouped_linear":
        transformers_moe.grouped(tape, ops)
    else:
        transformers_linear.fused(tape, ops)


def _called(block: Block, group: Callable[[Op], str]) -> Iterator[Op]:
    """The order of the layer code: a norm of q or k is called on the projection at once (models/qwen3/modeling_qwen3.py), but where one
    call makes q, k and v (unsloth models/qwen3.py, apply_qkv)."""
    alone = {out.name for op in block.ops if not group(op) for out in op.outputs}
    norms = {
        op.inputs[0]: op
        for op in block.ops
        if op.module == "qk_layernorm" and op.attrs.get("per_head") is not None and op.inputs[0] in alone
    }
    for op in transformers_moe.called(block.family, block.ops):
        if op in norms.values():
            continue
        if op.kind == "rope" and norms and block.family in _TURNS_FIRST:
            yield from _turned_first(op, tuple(norms.values()))
            continue
        yield _stream_first(block, op) if block.family in _STREAM_FIRST else op
        if op.outputs[0].name in norms and block.family not in _TURNS_FIRST:
            yield norms[op.outputs[0].name]


def _turned_first(rope: Op, norms: tuple[Op, ...]) -> Iterator[Op]:
    """The rotary embedding of q and k, then their norms (models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py)."""
    turned = tuple(replace(out, name=f"{out.name}.unnormed") for out in rope.outputs)
    yield replace(rope, inputs=tuple(norm.inputs[0] for norm in norms), outputs=turned)
    for norm, before, after in zip(norms, turned, rope.outputs, strict=True):
        yield replace(norm, inputs=(before.name,), outputs=(after,))


_TURNS_FIRST = frozenset({"hunyuan_v1_dense"})


def _stream_first(block: Block, op: Op) -> Op:
    """Of the sums of parallel branches: (stream + attention) + mlp instead of stream + (attention + mlp)."""
    if op.name == "add_branches":
        return replace(op, inputs=(block.input.name, op.inputs[0]))
    if op.name == "add":
        (mlp,) = (other.inputs[1] for other in block.ops if other.name == "add_branches")
        return replace(op, inputs=(op.inputs[1], mlp))
    return op


_STREAM_FIRST = frozenset({"cohere", "cohere2", "stablelm"})


selective = transformers_selective.policy


def modules(steps: tuple[Step, ...], names: tuple[str, ...]) -> tuple[Segment, ...]:
    """Parts of a layer under torch's checkpoint, each run again as far as its backward needs (trace/checkpointed.py)."""
    return tuple(replace(segment, early_stop=True) for segment in module_segments(steps, names))


def buffers(context: Context) -> tuple[Buffer, ...]:
    """Inverse frequencies of the rotary embedding, as they are and as they were (models/llama/modeling_llama.py); BERT's positions and
    token types; of images nothing."""
    if "patches" in context.sizes:
        return ()
    if "token_types" in context.sizes:
        names = ("position_ids", "token_type_ids") if context.sizes["token_types"] else ("position_ids",)
        return tuple(context.buffer(name, (1, "positions"), "int64", name) for name in names)
    size = context.sizes.get("rope_dim", context.sizes.get("head_dim"))
    if not isinstance(size, int) or TARGET in context.sizes:  # T5 turns nothing
        return ()
    return tuple(context.buffer(name, (size // 2,), "fp32", name) for name in ("inv_freq", "original_inv_freq"))


def residual(tape: Tape, op: Op) -> Value:
    tape.module = ""
    left, right = (tape[name] for name in op.inputs)
    if tape.family in _MULTIPLIES:
        right = tape.scale(right, f"{right.name}.scaled")
    output = tape.like(op.outputs[0], promote(left.dtype, right.dtype))
    return tape.add(left, right, output, "residual stream")


_MULTIPLIES = frozenset({"granite", "granitemoe"})
"""Models that scale each branch before it joins the stream, by 1 too."""


def dropout(tape: Tape, op: Op) -> Value:
    tape.module = op.module
    source = tape[op.inputs[0]]
    return transformers_attention.dropout(tape, source, tape.like(op.outputs[0], source.dtype))


KERNELS: Mapping[str, Emit] = {
    "embedding": transformers_linear.embedding,
    "norm": transformers_norm.norm,
    "linear": transformers_linear.linear,
    "rope": transformers_rope.rope,
    "attention": transformers_attention.attention,
    "mask": transformers_positions.mask,
    "positions": transformers_positions.positions,
    "scale": transformers_positions.scale,
    "activation": transformers_mlp.activation,
    "xielu": transformers_xielu.xielu,
    "residual": residual,
    "dropout": dropout,
    "loss": transformers_loss.loss,
    "conv2d": transformers_encoders.conv2d,
    "patch_positions": transformers_encoders.patch_positions,
    "first_token": transformers_encoders.first_token,
    "add_losses": transformers_encoders.add_losses,
    "split": transformers_latent.split,
    "mla_assemble": transformers_latent.assemble,
    "router": transformers_moe.router,
    "dispatch": transformers_moe.dispatch,
    "combine": transformers_moe.combine,
    "shared_gate": transformers_moe.shared_gate,
    "query_gate": transformers_delta.query_gate,
    "output_gate": transformers_delta.output_gate,
    "delta_split": transformers_delta.split,
    "causal_conv": transformers_delta.convolution,
    "delta_rule": transformers_delta.rule,
    "gated_norm": transformers_delta.norm,
}
