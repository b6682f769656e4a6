"""Attention in torchtitan: rotary embedding in complex fp32, scaled_dot_product_attention, flex attention, latent attention."""

from __future__ import annotations

from ullage.kernels.step import Buffer, Context, Step
from ullage.kernels.torchtitan_version import KV_REPEATED_UNTIL, before
from ullage.model.graph import BATCH, SEQ, Op


def rope(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """q and k go up to fp32, are multiplied as complex numbers and come back: nothing is saved, two fp32 copies of each pass by."""
    (op,) = ops
    steps = []
    for source, tensor in zip(op.inputs, op.outputs, strict=True):
        letter = tensor.name[0]
        roped = context.tensor(tensor, f"{letter} after rotary embedding")
        scratch: tuple[Buffer, ...] = ()
        if not context.compile:
            scratch = tuple(
                context.buffer(
                    f"rope.{letter}.{part}", tensor.dims, "fp32", f"rotary embedding of {letter}, fp32 {part}"
                )
                for part in ("input", "product")
            )
        steps.append(
            Step(
                name=f"rope.{letter}",
                reads=(source,),
                writes=(roped,),
                scratch=scratch,
                backward_scratch=scratch,
                module="rope",
            )
        )
    return steps


def attention(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    steps: list[Step] = []
    q, k, v = op.inputs
    if _repeats(context):
        for name, head_dim in ((k, "head_dim"), (v, "v_head_dim")):
            whole = context.buffer(
                f"{name}.repeated", (BATCH, SEQ, "heads", head_dim), what=f"{name[0]} repeated for every head"
            )
            steps.append(Step(name=f"{name[0]}_repeat", reads=(name,), writes=(whole,), module="core_attn"))
        k, v = f"{k}.repeated", f"{v}.repeated"
    output = context.tensor(op.outputs[0], "attention output")
    lse = context.buffer("lse", (BATCH, "heads", SEQ), "fp32", "log-sum-exp of the attention scores")
    steps.append(
        Step(
            name="attention",
            reads=(q, k, v),
            writes=(output, lse),
            saves=(q, k, v, output.name, lse.name),
            scratch=_gathered(context) if context.cp > 1 else (),
            backward_scratch=_backward(op, context),
            module="core_attn",
            op="attention",
        )
    )
    return steps


def _repeats(context: Context) -> bool:
    """Whether k and v are copied for every query head (repeat_kv)."""
    return (
        before(context, KV_REPEATED_UNTIL)
        and context.size("kv_heads") < context.size("heads")
        and "nope_dim" not in context.sizes
    )


def ring_heads(context: Context) -> str:
    """Of the keys and values that ranks exchange: all, where they were copied for every query head before."""
    return "heads" if _repeats(context) or "nope_dim" in context.sizes else "kv_heads"


def _gathered(context: Context) -> tuple[Buffer, ...]:
    """Ring attention with all-gather rotation (its default): local k and v joined, then those of the whole sequence, and a running
    output in fp32 (torch distributed/tensor/experimental/_attention.py)."""
    heads = ring_heads(context)
    joined = [
        context.buffer("cp.joined", (BATCH, SEQ, heads, dim), what="k and v joined for the gather")
        for dim in ("head_dim", "v_head_dim")
    ]
    return (
        Buffer("cp.joined", sum(part.bytes for part in joined), "k and v joined for the gather", joined[0].formula),
        Buffer(
            "cp.gathered",
            context.cp * sum(part.bytes for part in joined),
            "k and v of the whole sequence",
            f"{context.cp} ranks x {joined[0].formula}, and v",
        ),
        context.buffer(
            "cp.merge", (BATCH, SEQ, "heads", "v_head_dim"), "fp32", "running output of ring attention", copies=2
        ),
    )


def _backward(op: Op, context: Context) -> tuple[Buffer, ...]:
    """FlashAttention-2 accumulates dq in fp32 and keeps row sums; context parallelism adds the gathered k and v and fp32 gradients."""
    found = [
        context.buffer("softmax_d", (BATCH, "heads", SEQ), "fp32", "row sums of the attention backward"),
    ]
    if context.attention == "flash" and context.option("attention_backend") != "flex":
        found.append(
            context.buffer(
                "dq_accumulator", (BATCH, SEQ, "heads", "head_dim"), "fp32", "fp32 accumulator of the q gradient"
            )
        )
    if context.cp > 1:
        heads = ring_heads(context)
        found += _gathered(context)[:2]
        found.append(
            context.buffer("cp.dkv", (BATCH, SEQ, heads, "head_dim"), "fp32", "fp32 gradients of k and v", copies=2 * 2)
        )
        found.append(context.buffer("cp.dq", (BATCH, SEQ, "heads", "head_dim"), "fp32", "fp32 gradient of q"))
    return tuple(found)


def latent_split(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    views = tuple((tensor.name, op.inputs[0]) for tensor in op.outputs)
    return [Step(name=op.name, reads=op.inputs, aliases=views, module="kv_down")]


def latent_assemble(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Rotary parts go through fp32; q and k are concatenated into new tensors, v is a view of the up-projection.

    models/deepseek_v3/model.py: ``torch.cat([q_nope, q_pe])``, ``torch.cat([k_nope, k_pe.expand(...)])``.
    """
    (op,) = ops
    q, k, v = (context.tensor(tensor, f"{tensor.name[0]} of latent attention") for tensor in op.outputs)
    scratch: tuple[Buffer, ...] = ()
    if not context.compile:
        dims = (BATCH, SEQ, "heads", "rope_dim")
        scratch = (
            context.buffer("rope.q.fp32", dims, "fp32", "rotary part of q, fp32", copies=2),
            context.buffer("rope.q.bf16", dims, what="rotary part of q"),
        )
    return [
        Step(
            name="assemble.q",
            reads=(op.inputs[0],),
            writes=(q,),
            scratch=scratch,
            backward_scratch=scratch,
            module="mla_up_proj",
        ),
        Step(name="assemble.k", reads=(op.inputs[1], op.inputs[2]), writes=(k,), module="mla_up_proj"),
        Step(name="assemble.v", reads=(op.inputs[1],), aliases=((v.name, op.inputs[1]),), module="mla_up_proj"),
    ]
