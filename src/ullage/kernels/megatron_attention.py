"""Attention in Megatron-Core: rotary embedding, core attention (flash, fused, unfused), latent attention's assembly."""

from __future__ import annotations

from ullage.frozen import replace
from ullage.kernels.megatron_common import is_local
from ullage.kernels.step import Buffer, Context, Step
from ullage.kernels.transformers_attention import flash_backward
from ullage.model.graph import BATCH, SEQ, Op, Tensor


def rope(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """New q and k, of which nothing is kept."""
    (op,) = ops
    turned = _turned_by_torch if op.attrs["scaled"] else _turned_at_once
    return [
        turned(f"rope.{tensor.name[0]}", read, tensor, context)
        for read, tensor in zip(op.inputs, op.outputs, strict=True)
    ]


def _turned_at_once(name: str, read: str, tensor: Tensor, context: Context) -> Step:
    return Step(name=name, reads=(read,), writes=(_turned(tensor, context),), module="rope")


UNFUSED_ROPE = (24, 28)
"""Bytes through memory of one 16-bit element, forward and backward: two products (8), half of it negated (2), halves joined (4), the sum
(6), and the joining with the dimensions past the rotary ones, of which there are none (4); back the same but for that, and zeros for
those (2), added (6). Traced with torch 2.13 op by op."""


def _turned_by_torch(name: str, read: str, tensor: Tensor, context: Context) -> Step:
    """Where cosines and sines are scaled (YaRN), which no fused kernel takes (models/common/embeddings/rope_utils.py, mscale)."""
    turned = _turned(tensor, context)
    beside = tuple(
        Buffer(f"{turned.name}.{part}", turned.bytes, part, turned.formula) for part in ("halves", "product")
    )
    forward, backward = (each * context.numel(tensor.dims) for each in UNFUSED_ROPE)
    return Step(
        name=name,
        reads=(read,),
        writes=(turned,),
        scratch=beside,
        backward_scratch=beside,
        module="rope",
        moves=(forward, backward),
    )


def _turned(tensor: Tensor, context: Context) -> Buffer:
    return context.tensor(tensor, f"{tensor.name[0]} after rotary embedding")


def attention(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    if context.attention in ("eager", "math"):
        return _unfused(op, context)
    return _flash(op, context)


CUDNN_SINCE = (9, 0)
"""Transformer Engine prefers cuDNN's kernel to FlashAttention from this compute capability on; it asks the same of AMD's, which has 9.4 and
more (pytorch/attention/dot_product_attention/utils.py, get_attention_backend)."""

BLACKWELL = (10, 0)


def runs_flash(context: Context, *, dropout: bool) -> bool:
    """Whether Transformer Engine takes FlashAttention and not cuDNN's attention, whose backward with dropout is not deterministic on
    Blackwell (common/fused_attn/fused_attn.cpp, nvte_get_fused_attn_backend)."""
    named = context.option("attention_backend")
    if named in ("flash", "fused"):
        return named == "flash"
    capability = context.compute_capability or CUDNN_SINCE
    deterministic = bool(context.option("deterministic_mode", False))
    return capability < CUDNN_SINCE or (capability >= BLACKWELL and deterministic and dropout)


def _flash(op: Op, context: Context) -> list[Step]:
    """FlashAttention or cuDNN's fused attention: saves q, k, v, the output and one fp32 log-sum-exp a row and head.

    FlashAttention has the batch before the sequence: it keeps its output so, and the projection keeps a copy with the sequence first
    (TE pytorch/attention/dot_product_attention/backends.py, FlashAttention.forward). Of one sequence both are the same tensor.
    """
    q, k, v = op.inputs
    prefix = op.name.removesuffix("attention")
    steps: list[Step] = []
    by_heads = context.cp > 1 and context.cp_kind == "ulysses"
    if by_heads:
        steps += [_exchange(letter, name, context) for letter, name in zip("qkv", (q, k, v), strict=True)]
        q, k, v = (f"{name}.exchanged" for name in (q, k, v))
    elif op.attrs["roped"] and context.option("transformer_impl", "transformer_engine") != "local":
        # q and k are new tensors after the rotary embedding, v still a view of the projection: TE's layout check fails on
        # the mixture and makes v contiguous (dot_product_attention/utils.py get_qkv_layout).
        name = f"{prefix}v_contiguous"
        whole = context.buffer(name, (BATCH, SEQ, "kv_heads", "v_head_dim"), what="v made contiguous")
        steps.append(Step(name=name, reads=(v,), writes=(whole,), module="core_attn"))
        v = whole.name
    output = context.tensor(op.outputs[0], "attention output")
    result = output
    flash = not is_local(context) and runs_flash(context, dropout=bool(op.attrs["dropout"]))
    transposed = flash and not by_heads
    shared_heads = flash and context.size("kv_heads") < context.size(
        "heads"
    )  # of which cuDNN adds up the gradients itself
    if by_heads:
        what = "attention output before its all-to-all"
        result = Buffer(f"{output.name}.exchanged", output.bytes, what, output.formula)
    elif transposed:
        what = "attention output, batch before sequence"
        result = Buffer(f"{output.name}.batch_first", output.bytes, what, output.formula)
    lse = context.buffer(f"{prefix}lse", (BATCH, "heads", SEQ), "fp32", "log-sum-exp of the attention scores")
    steps.append(
        Step(
            name=op.name,
            reads=(q, k, v),
            writes=(result, lse),
            saves=(q, k, v, result.name, lse.name),
            backward_scratch=flash_backward(context, shared_heads=shared_heads),
            module="core_attn",
        )
    )
    if by_heads:  # the projection keeps the output after the all-to-all, the attention the one before
        steps.append(Step(name=f"exchange.{output.name}", reads=(result.name,), writes=(output,), module="core_attn"))
    elif transposed:
        steps.append(_sequence_first(result.name, output, context))
    return steps


def _sequence_first(name: str, output: Buffer, context: Context) -> Step:
    """The output as the projection reads it; of one sequence it is a view."""
    step = Step(name=f"transpose.{output.name}", reads=(name,), module="core_attn")
    if context.size(BATCH) > 1:
        return replace(step, writes=(output,))
    return replace(step, aliases=((output.name, name),), passes=(name,), moves=(0, 0))


_HEADS = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}


def _exchange(letter: str, name: str, context: Context) -> Step:
    """Ulysses: an all-to-all trades the sequence's division for one of the heads (TE AttnFuncWithCPAndQKVOA2A): equal bytes."""
    dim = "v_head_dim" if letter == "v" else "head_dim"
    moved = context.buffer(
        f"{name}.exchanged", (BATCH, SEQ, _HEADS[letter], dim), what=f"{letter} after the all-to-all over heads"
    )
    return Step(name=f"exchange.{name}", reads=(name,), writes=(moved,), module="core_attn")


def _unfused(op: Op, context: Context) -> list[Step]:
    """Scores and probabilities as whole s x s matrices (TE UnfusedDotProductAttention, Megatron DotProductAttention).

    moves: the two batched matmuls read and write for themselves. ALiBi is copied into their first argument, for each query, and read by the
    first; q and k take a product with the scale in the backward, the output is copied to its place among the heads. A causal softmax
    reads the triangle alone and writes all of the square, in the backward in place (fused_kernels/scaled_upper_triang_masked_softmax.h).
    """
    q, k, v = op.inputs
    scores = context.buffer(f"{op.name}_scores", (BATCH, "heads", SEQ, SEQ), what="attention scores")
    probs = context.buffer(f"{op.name}.probs", (BATCH, "heads", SEQ, SEQ), what="attention probabilities")
    output = context.tensor(op.outputs[0], "attention output")
    read = 0.5 if op.attrs.get("causal") else 1.0
    scaled = 2 * sum(context.buffer("q", (BATCH, SEQ, heads, "head_dim")).bytes for heads in ("heads", "kv_heads"))
    steps = [
        Step(
            name=scores.name,
            reads=(q, k),
            writes=(scores,),
            saves=(q, k),
            # the local layers take it from the global buffer, which the engine counts
            scratch=() if context.option("transformer_impl") == "local" else (scores_input(context),),
            moves=(2 * scores.bytes if op.attrs.get("alibi") else 0, scaled),
            module="core_attn",
        ),
        Step(
            name="softmax",
            reads=(scores.name,),
            writes=(probs,),
            saves=(probs.name,),
            passes=(scores.name,),
            moves=(round((read + 1) * probs.bytes), round((2 * read + 1) * probs.bytes)),
            module="core_attn",
        ),
    ]
    if op.attrs["dropout"]:
        steps.append(_dropout(op, probs, context))
    source = steps[-1].writes[0].name
    steps.append(
        Step(
            name=op.name,
            reads=(source, v),
            writes=(output,),
            saves=(source, v),
            moves=(2 * output.bytes, 2 * output.bytes),
            module="core_attn",
        )
    )
    return steps


def _dropout(op: Op, probs: Buffer, context: Context) -> Step:
    dims = (BATCH, "heads", SEQ, SEQ)
    dropped = context.buffer(f"{op.name}.dropped", dims, what="probabilities after dropout")
    mask = context.buffer(f"{op.name}.mask", dims, "bool", "dropout mask of the probabilities")
    return Step(
        name="attention_dropout",
        reads=(probs.name,),
        writes=(dropped, mask),
        saves=(mask.name,),
        module="core_attn",
    )


def scores_input(context: Context) -> Buffer:
    """baddbmm's empty first argument, as large as its result."""
    return context.buffer("scores.input", (BATCH, "heads", SEQ, SEQ), what="empty input of the score matmul")


def latent_split(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            aliases=tuple((tensor.name, op.inputs[0]) for tensor in op.outputs),
            module="kv_down",
        )
    ]


def latent_assemble(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Rope on the rotary parts, then whole q, k and v as new tensors; the shared rotary key is expanded into every head."""
    (op,) = ops
    q, k, v = (context.tensor(tensor, f"{tensor.name[0]} of latent attention") for tensor in op.outputs)
    return [
        Step(name="assemble.q", reads=(op.inputs[0],), writes=(q,), module="mla_up_proj"),
        Step(name="assemble.kv", reads=(op.inputs[1], op.inputs[2]), writes=(k, v), module="mla_up_proj"),
    ]
