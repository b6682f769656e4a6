"""Attention of transformers' models: sdpa (flash, mem-efficient, math) and eager attention."""

from __future__ import annotations

from ullage.kernels import transformers_masks as masks
from ullage.kernels import transformers_positions
from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Buffer, Context, Crossing
from ullage.kernels.transformers_rope import JOINS
from ullage.model.graph import BATCH, SEQ, Op

LARGEST_GQA_HEAD = 256
"""Up to this head dimension sdpa reads few key heads for many query heads (integrations/sdpa_attention.py, use_gqa_in_sdpa)."""
MASK_ALIGNMENT = 8
"""CUDA's mem-efficient kernel wants mask columns in multiples of this (aten/src/ATen/native/transformers/attention.cpp)."""
FLASH_ROW_BLOCK = 128
"""Flash attention rounds query rows up to this (csrc/flash_attn/flash_api.cpp, round_multiple)."""


# -- attention


def attention(tape: Tape, op: Op) -> Value:
    tape.module = op.module
    if op.attrs.get("positions"):
        return transformers_positions.attention(tape, op)
    if masks.is_eager(tape.context, op):
        return _eager(tape, op)
    return _sdpa(tape, op)


def _sdpa(tape: Tape, op: Op) -> Value:
    """torch.nn.functional.scaled_dot_product_attention; autocast casts q, k and v into the compute type first, v before k before q."""
    context = tape.context
    q, k, v = (tape[name] for name in op.inputs)
    given = masks.borrowed(tape, op)
    masked = given is not None
    grouped = context.size("kv_heads") < context.size("heads") and "nope_dim" not in context.sizes
    if grouped and (
        masked or context.size("head_dim") > LARGEST_GQA_HEAD or context.size("head_dim") != context.size("v_head_dim")
    ):
        k, v = (_repeated(tape, one) for one in (k, v))
    named = (k, v)
    k, q, v = (tape.cast(one, context.compute, f"{one.name}.{context.compute}") for one in (k, q, v))
    if context.attention == "math":
        return _math(tape, op, q, k, v)
    bias = () if given is None else (_bias(tape, q, *given),)
    lse = context.buffer("lse", (BATCH, "heads", SEQ), "fp32", "log-sum-exp of the attention scores")
    output = tape.like(op.outputs[0], context.compute)
    made = Value("attention.heads_first", output.dims, output.dtype) if _heads_first(tape) else output
    tape.emit(
        made.name if made is not output else "attention",
        (q, k, v, *bias),
        made,
        what="attention output",
        beside=(lse,),
        saves=(q, k, v, made, lse.name, *bias),
        no_grad=bias,
        backward_scratch=_kernel_backward(tape, op),
        op="attention",
    )
    if made is not output:
        tape.emit("attention", (made,), output, what="attention output, tokens first", passes=(made,))
    tape.hold(*named)
    return output


def _heads_first(tape: Tape) -> bool:
    """q came out of a concatenation, heads before tokens; the kernel's output takes its layout and is copied for the projection."""
    return tape.family in JOINS or "nope_dim" in tape.context.sizes


def _bias(tape: Tape, q: Value, mask: Value, borrows: tuple[Crossing, ...]) -> Value:
    """The boolean mask becomes an additive one in every layer, before the kernel runs and so by no op that selective recomputation knows
    (attention.cpp, convert_boolean_attn_mask)."""
    columns = tape.context.size(SEQ)
    if on_cuda(tape.context, "attention mask"):
        columns = -(-columns // MASK_ALIGNMENT) * MASK_ALIGNMENT
    made = Value("attention_bias", (BATCH, 1, SEQ, columns), q.dtype)
    return tape.emit(made.name, (mask,), made, what="additive attention mask", no_grad=(mask,), borrows=borrows)


def _kernel_backward(tape: Tape, op: Op) -> tuple[Buffer, ...]:
    context = tape.context
    shared = context.size("kv_heads") < context.size("heads") and not masks.needs_mask(context, op.attrs["window"])
    return flash_backward(context, shared_heads=shared)


def flash_backward(context: Context, *, shared_heads: bool) -> tuple[Buffer, ...]:
    """What the CUDA kernels allocate inside their backward.

    Flash: fp32 dq accumulator and row sums, and whole key and value gradients where query heads share them (flash_api.cpp, mha_bwd).
    """
    if not on_cuda(context, "attention backward"):
        return ()
    rows = -(-context.size(SEQ) // FLASH_ROW_BLOCK) * FLASH_ROW_BLOCK
    sums = context.buffer("softmax_d", (BATCH, "heads", rows), "fp32", "row sums of the attention backward")
    if context.attention == "mem-efficient":
        return (sums,)
    accumulator = context.buffer(
        "dq_accumulator", (BATCH, rows, "heads", "head_dim"), "fp32", "fp32 accumulator of the q gradient"
    )
    if not shared_heads:
        return (sums, accumulator)
    expanded = (
        context.buffer(
            f"d{one}_expanded", (BATCH, SEQ, "heads", "head_dim"), None, f"{one} gradient of every query head"
        )
        for one in ("k", "v")
    )
    return (sums, accumulator, *expanded)


def _repeated(tape: Tape, value: Value) -> Value:
    """repeat_kv: a copy for every query head; its backward sums them."""
    context = tape.context
    if context.size("kv_heads") == context.size("heads") or value.dims[2] == "heads":
        return value
    dims = (*value.dims[:2], "heads", *value.dims[3:])
    name = f"{value.name}.repeated"
    return tape.emit(
        name, (value,), Value(name, dims, value.dtype), what=f"{value.name[0]} repeated for every query head"
    )


def _scores(name: str, dtype: str) -> Value:
    return Value(name, (BATCH, "heads", SEQ, SEQ), dtype)


def _math(tape: Tape, op: Op, q: Value, k: Value, v: Value) -> Value:
    """_scaled_dot_product_attention_math: q and k scaled by the square root of the scale, whole scores, softmax, product."""
    context = tape.context
    k, v = (_repeated(tape, one) for one in (k, v))
    q, k = (tape.scale(one, f"{one.name}.scaled") for one in (q, k))
    dtype = context.compute
    scores = tape.emit(
        "attention.scores", (q, k), _scores("attention.scores", dtype), what="attention scores", saves=(q, k)
    )
    masked = tape.emit("attention.masked", (scores,), _scores("attention.masked", dtype), passes=(scores,))
    probs = _scores("attention.probs", dtype)
    tape.emit("attention.probs", (masked,), probs, what="attention probabilities", saves=(probs,))
    output = tape.like(op.outputs[0], dtype)
    product = Value("attention.product", output.dims, dtype)
    tape.emit(product.name, (probs, v), product, saves=(probs, v))
    return tape.emit("attention", (product,), output, what="attention output")


def _eager(tape: Tape, op: Op) -> Value:
    """eager_attention_forward (models/llama/modeling_llama.py): whole scores, an fp32 softmax, a copy in the compute type."""
    context = tape.context
    q, k, v = (tape[name] for name in op.inputs)
    repeats = context.size("kv_heads") < context.size("heads")
    k, v = (_repeated(tape, one) for one in (k, v))
    joined = _heads_first(tape)
    query = _autocast_bmm(tape, q, "q.matmul", copies=not joined)
    key = _autocast_bmm(tape, k, "k.matmul", copies=not joined and not repeats)
    dtype = context.compute
    scores = tape.emit(
        "attention.scores",
        (query, key),
        _scores("attention.scores", dtype),
        what="attention scores",
        saves=(query, key),
    )
    weights = tape.scale(scores, "attention.scaled")
    if op.attrs["softcap"]:
        weights = _softcap(tape, weights, "attention.scores")
    masked = _masked(tape, op, weights)
    softmax = _softmax_type(tape, masked)
    wide = tape.cast(masked, softmax, "attention.scores32")
    probs = _scores("attention.probs", softmax)
    tape.emit("attention.probs", (wide,), probs, what="attention probabilities", saves=(probs,))
    narrow = probs if tape.family in _KEEPS_PROBABILITIES else tape.cast(probs, q.dtype, "attention.probs16")
    tape.hold(masked)
    narrow = weights_returned = _dropout(tape, op, narrow)
    narrow = _autocast_bmm(tape, narrow, "probs.matmul", copies=False)
    value = _autocast_bmm(tape, v, "v.matmul", copies=not repeats)
    output = tape.like(op.outputs[0], dtype)
    product = Value("attention.product", output.dims, dtype)
    tape.emit(product.name, (narrow, value), product, saves=(narrow, value))
    tape.emit("attention", (product,), output, what="attention output")
    tape.hold(k, v)
    tape.values["attention.weights"] = weights_returned
    return output


def _masked(tape: Tape, op: Op, weights: Value) -> Value:
    """The mask is added, where there is one."""
    given = masks.borrowed(tape, op)
    if given is None:
        return weights
    mask, borrows = given
    masked = Value("attention.masked", weights.dims, promote(weights.dtype, mask.dtype))
    passes = (weights,) if masked.dtype == weights.dtype else ()
    return tape.emit(masked.name, (weights, mask), masked, passes=passes, no_grad=(mask,), borrows=borrows)


_OWN_SOFTMAX = frozenset({"bert", "distilbert", "gpt2", "roberta", "xlm-roberta"})
"""Models whose softmax runs in the scores' own type."""
_KEEPS_PROBABILITIES = frozenset({"bert", "distilbert", "roberta", "xlm-roberta"})
"""Of those, models that leave the probabilities in it, until the product casts them under autocast."""


def _softmax_type(tape: Tape, scores: Value) -> str:
    if tape.family not in _OWN_SOFTMAX:
        return "fp32"
    widens = tape.context.autocast and on_cuda(tape.context, "autocast of layer norm and softmax")
    return "fp32" if widens else scores.dtype


def _autocast_bmm(tape: Tape, value: Value, name: str, *, copies: bool) -> Value:
    """A bmm's operand: cast under autocast, and copied where its layout is not the batched matrix's."""
    compute = tape.context.compute
    if value.dtype != compute:
        value = tape.cast(value, compute, f"{name}.{compute}")
    if not copies or tape.context.size(BATCH) == 1:  # one sequence's heads are a batch of matrices as they lie
        return value
    return tape.emit(name, (value,), Value(name, value.dims, value.dtype), passes=(value,))


def _softcap(tape: Tape, value: Value, name: str) -> Value:
    """cap * tanh(x / cap): the tanh is saved."""
    divided = tape.scale(value, f"{name}.divided")
    bounded = Value(f"{name}.tanh", value.dims, value.dtype)
    tape.emit(bounded.name, (divided,), bounded, saves=(bounded,))
    return tape.scale(bounded, f"{name}.capped")


def _dropout(tape: Tape, op: Op, probs: Value) -> Value:
    if not op.attrs["dropout"]:
        return probs
    return dropout(tape, probs, Value("probs.dropped", probs.dims, probs.dtype))


def dropout(tape: Tape, source: Value, output: Value) -> Value:
    dtype = "bool" if on_cuda(tape.context, "dropout mask") else source.dtype
    mask = tape.context.buffer(f"{output.name}.mask", source.dims, dtype, "dropout mask")
    return tape.emit(output.name, (source,), output, beside=(mask,), saves=(mask.name,))
