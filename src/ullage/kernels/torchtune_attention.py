"""Attention and embedding in torchtune: rotary embedding in fp32 from a cache, keys and values copied for every query head."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value
from ullage.kernels.transformers_attention import flash_backward
from ullage.model.graph import BATCH, SEQ, Op


def embedding(tape: Tape, op: Op) -> Value:
    tape.module = "embedding"
    param = op.params[0]
    output = tape.like(op.outputs[0], tape.context.residual)
    return tape.emit(op.name, (), output, what="embedding output", weights=(tape.weight(param.name, param.dims),))


def rope(tape: Tape, op: Op) -> None:
    """x.float(), four products of halves, joined and cast back; packed batches index the cache anew, and that part is saved."""
    tape.module = "rope"
    for name, tensor in zip(op.inputs, op.outputs, strict=True):
        source = tape[name]
        wide = tape.cast(source, "fp32", f"{name}.fp32")
        turned = Value(f"{tensor.name}.fp32", tensor.dims, "fp32")
        halves = (tape.scratch(f"{tensor.name}.products", wide),)
        table = (
            tape.context.buffer(
                f"{tensor.name}.table", (BATCH, SEQ, "head_dim"), "fp32", "rotary cache at the packed positions"
            ),
        )
        packed = is_packed(tape)
        tape.emit(
            turned.name,
            (wide,),
            turned,
            beside=table if packed else (),
            saves=[one.name for one in table] if packed else (),
            scratch=halves,
            backward_scratch=halves,
        )
        tape.cast(turned, source.dtype, tensor.name)


def compiled_rope(tape: Tape, op: Op) -> None:
    """Fused with what surrounds it: nothing is saved and nothing passes by."""
    tape.module = "rope"
    for name, tensor in zip(op.inputs, op.outputs, strict=True):
        tape.emit(
            tensor.name,
            (tape[name],),
            tape.like(tensor, tape[name].dtype),
            what=f"{tensor.name[0]} after rotary embedding",
        )


def is_packed(tape: Tape) -> bool:
    """Packed batches come with a block mask, which FlexAttention takes."""
    return tape.context.option("attention_backend") == "flex"


def attention(tape: Tape, op: Op) -> Value:
    """sdpa, or FlexAttention for packed batches: keeps q, k, v for every head, the output and one fp32 number a row and head."""
    tape.module = op.module
    context = tape.context
    q, k, v = (tape[name] for name in op.inputs)
    if context.size("kv_heads") < context.size("heads"):
        k, v = (_repeated(tape, one) for one in (k, v))
    lse = context.buffer("lse", (BATCH, "heads", SEQ), "fp32", "log-sum-exp of the attention scores")
    output = tape.like(op.outputs[0], q.dtype)
    sums = context.buffer("softmax_d", (BATCH, "heads", SEQ), "fp32", "row sums of the attention backward")
    return tape.emit(
        "attention",
        (q, k, v),
        output,
        what="attention output",
        beside=(lse,),
        saves=(q, k, v, output, lse.name),
        backward_scratch=(sums,) if is_packed(tape) else flash_backward(context, shared_heads=False),
    )


def _repeated(tape: Tape, value: Value) -> Value:
    """expand(...).flatten(1, 2): a copy for every query head."""
    name = f"{value.name}.repeated"
    dims = (*value.dims[:2], "heads", *value.dims[3:])
    return tape.emit(
        name, (value,), Value(name, dims, value.dtype), what=f"{value.name[0]} repeated for every query head"
    )
