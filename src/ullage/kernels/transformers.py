"""The layer code of Hugging Face transformers, op by op as its eager PyTorch runs it (5.x; 4.x where memory differed).

Closed forms for a Llama layer (u = tokens x hidden x 2 B, g = kv heads / heads, a = MLP width / hidden): bf16 u(10 + 2g + 4a) + 4TH;
fp32 weights under autocast u(15 + 2g + 4a) + 2 x parameters; fp32 2u(8 + 2g + 4a) + 4TH. They fall out of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ullage.errors import Unsupported
from ullage.kernels import (
    transformers_attention,
    transformers_latent,
    transformers_linear,
    transformers_loss,
    transformers_mlp,
    transformers_moe,
    transformers_norm,
    transformers_rope,
)
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Buffer, Context, Segment, Step
from ullage.model.graph import Block, Op

Emit = Callable[[Tape, Op], object]


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    """The steps of a block. What a frame of the layer code still names when its last op runs is held to there."""
    tape = Tape(context, block)
    waiting: list[Op] = []
    for op in _called(block.ops):
        joins = _joins(op)
        if waiting and joins != _joins(waiting[0]):
            _together(tape, tuple(waiting))
            waiting = []
        if joins:
            waiting.append(op)
            continue
        kernel = KERNELS.get(op.kind)
        if kernel is None:
            raise Unsupported(f"has no kernel for op {op.name!r} of kind {op.kind!r}", key="stack", value=context.stack)
        kernel(tape, op)
        _frames(tape, block, op)
    return tuple(tape.steps)


def _joins(op: Op) -> str:
    """The group of an op that is one call together with its neighbours; "" for an op by itself."""
    if op.kind == "grouped_linear" or (op.kind == "linear" and op.attrs["fused"]):
        return str(op.attrs["group"] or op.name)
    return ""


def _together(tape: Tape, ops: tuple[Op, ...]) -> None:
    if ops[0].kind == "grouped_linear":
        transformers_moe.grouped(tape, ops)
    else:
        transformers_linear.fused(tape, ops)


def _called(ops: tuple[Op, ...]) -> Iterator[Op]:
    """The order of the layer code: a norm of q or k is called on the projection at once (models/qwen3/modeling_qwen3.py)."""
    norms = {op.inputs[0]: op for op in ops if op.module == "qk_layernorm" and op.attrs.get("per_head") is not None}
    for op in ops:
        if op in norms.values():
            continue
        yield op
        if op.outputs[0].name in norms:
            yield norms[op.outputs[0].name]


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    raise Unsupported(
        "has no selective recomputation of its own",
        key="recompute",
        value="selective",
        remedy="use full, or name modules",
    )


def buffers(context: Context) -> tuple[Buffer, ...]:
    """Inverse frequencies of the rotary embedding, as they are and as they were (models/llama/modeling_llama.py)."""
    size = context.sizes.get("rope_dim", context.sizes.get("head_dim"))
    if not isinstance(size, int):
        return ()
    return tuple(context.buffer(name, (size // 2,), "fp32", name) for name in ("inv_freq", "original_inv_freq"))


def _frames(tape: Tape, block: Block, op: Op) -> None:
    """Locals of the layer's frames: a layer's input lives to its end, and the arguments of a branch to the branch's end."""
    named = _LOCALS.get(tape.family, {})
    if op.outputs[0].name == block.output.name and block.role == "layer":
        _hold(tape, (block.input.name, "attention.weights", *named.get("end", ())))
    _hold(tape, named.get(op.name, _ARGUMENTS.get(op.name, ())))


def _hold(tape: Tape, names: tuple[str, ...]) -> None:
    tape.hold(*(tape[name] for name in names if name in tape.values))


_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "o_proj": ("attention_in", "q_final", "k_final", "v"),
    "down_proj": ("mlp_in",),
    "combine": ("mlp_in",),
}
"""op -> what the frames that return with it name."""
_LATENT = ("attention_in", "q_up", "kv_down", "kv_latent", "q_pe.rotated", "k_pe.rotated", "q_final", "k_final", "v")
_LOCALS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "deepseek_v2": {"o_proj": _LATENT},
    "deepseek_v3": {"o_proj": _LATENT},
    "gpt2": {
        "o_proj": (),
        "attention_add": ("attention_in",),
        "down_proj": (),
        "end": ("attention_out", "attention_out_dropped", "mlp_in"),
    },
    "gpt_neox": {"end": ("attention_out", "attention_out_dropped", "mlp_out", "mlp_out_dropped")},
}
"""Models whose layers keep other names; "end": of the whole layer."""


def residual(tape: Tape, op: Op) -> Value:
    tape.module = ""
    left, right = (tape[name] for name in op.inputs)
    output = tape.like(op.outputs[0], promote(left.dtype, right.dtype))
    return tape.add(left, right, output, "residual stream")


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
    "activation": transformers_mlp.activation,
    "residual": residual,
    "dropout": dropout,
    "loss": transformers_loss.loss,
    "split": transformers_latent.split,
    "mla_assemble": transformers_latent.assemble,
    "router": transformers_moe.router,
    "dispatch": transformers_moe.dispatch,
    "combine": transformers_moe.combine,
    "shared_gate": transformers_moe.shared_gate,
}
