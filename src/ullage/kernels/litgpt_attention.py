"""Attention in litgpt (model.py, CausalSelfAttention; lora.py, LoRAQKVLinear)."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ullage.frozen import FrozenMap
from ullage.job.adapted import is_adapted
from ullage.kernels import transformers_adapters as adapters
from ullage.kernels import transformers_quantised as quantised
from ullage.kernels.eager import Tape, Value
from ullage.kernels.transformers_attention import dropout, flash_backward
from ullage.kernels.transformers_matmul import matmul
from ullage.kernels.transformers_rope import rotate
from ullage.model.graph import BATCH, SEQ, Dim, Op, Param

UNTANGLED_SINCE = "2024-12-26"
"""Until then the joined projection held each group's queries, key and value side by side: what is cut out of it is copied where a
group has several queries, and the key and value are repeated before they are turned."""
IN_PLACE_SINCE = "2024-05-06"
"""Since then the adapters' output is written into zeros in place, where a copy was made of them."""


def projected(tape: Tape, ops: tuple[Op, ...]) -> None:
    """One linear for queries, keys and values, and the parts that are cut out of it."""
    first = ops[0]
    tape.module = first.module
    inner = first.attrs["in"]
    assert isinstance(inner, tuple)
    sizes = [tape.context.numel(op.outputs[0].dims[2:]) for op in ops]
    source = tape[first.inputs[0]]
    params: list[tuple[str, tuple[Dim, ...]]] = [("qkv.weight", (sum(sizes), *inner))]
    if len(adapters.base(first)) > 1:
        params.append(("qkv.bias", (sum(sizes),)))
    whole = Value("qkv", (*source.rows, sum(sizes)), tape.context.compute)
    if is_adapted(first):
        base = _base(tape, first, source, params, replace(whole, name="qkv.base"))
        whole = _added(tape, first, source, base, whole, sizes)
    else:
        whole = _base(tape, first, source, params, whole)
    parts = tuple(tape.like(op.outputs[0], whole.dtype) for op in ops)
    if _is_untangled(tape) or tape.context.size("kv_heads") == tape.context.size("heads"):
        tape.views(whole, parts)
    else:
        pieces = tuple(replace(part, name=f"{part.name}.piece") for part in parts)
        tape.views(whole, pieces)
        for piece, part in zip(pieces, parts, strict=True):
            _for_every_head(tape, piece, part.name)
    tape.values["qkv.frame"] = whole


def _base(tape: Tape, op: Op, source: Value, params: list[tuple[str, tuple[Dim, ...]]], output: Value) -> Value:
    if quantised.is_quantised(op):
        return quantised.linear(
            tape, replace(op, attrs=FrozenMap()), "qkv", source, params[0][1], replace(output, dtype=source.dtype)
        )
    return matmul(tape, "qkv.base", source, params, output)


def _is_untangled(tape: Tape) -> bool:
    return (tape.context.version or UNTANGLED_SINCE) >= UNTANGLED_SINCE


def _for_every_head(tape: Tape, piece: Value, name: str) -> Value:
    """A piece for every query head: a copy, except of a single group, whose queries lie together and whose key and value are expanded."""
    made = Value(name, (*piece.dims[:2], "heads", *piece.dims[3:]), piece.dtype)
    if tape.context.size("kv_heads") == 1 and not _is_untangled(tape):
        return tape.view(piece, made.name, made.dims, copies=True)
    return tape.emit(made.name, (piece,), made, what=f"{name[0]} of every query head")


# -- adapters


def _added(tape: Tape, op: Op, source: Value, base: Value, output: Value, sizes: list[int]) -> Value:
    """base + padded(B(A(dropout(x)))) x scaling: B is a grouped convolution over the tokens, or one for each part, joined."""
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    names = adapter["parts"]
    assert isinstance(names, tuple)
    low, high = op.params[-2:]
    dropped = source
    if adapter["dropout"]:
        dropped = dropout(tape, source, Value("qkv.dropped", source.dims, source.dtype))
    rank = prod(tape.context.size(dim) for dim in low.dims[:1])
    inner = Value("qkv.lora_A.out", (*source.rows, rank), tape.context.compute)
    inner = matmul(tape, low.name, dropped, [(low.name, low.dims)], inner, dtype=low.elements)
    outer = _convolved(tape, high, inner, len(names))
    padded = outer if len(names) == len(sizes) else _padded(tape, outer, output)
    scaled = tape.scale(padded, "qkv.lora.scaled")
    made = tape.add(base, scaled, output, "qkv output")
    tape.hold(base, inner, outer, scaled)
    return made


def _convolved(tape: Tape, high: Param, inner: Value, parts: int) -> Value:
    weight = tape.weight(high.name, high.dims)
    width = tape.context.size(high.dims[0])
    out = Value("qkv.lora_B.out", (*inner.rows, width), inner.dtype)
    if parts == 1 or tape.context.size("kv_heads") == tape.context.size("heads"):
        return tape.emit(high.name, (inner,), out, what="qkv adapters' output", saves=(inner,), weights=(weight,))
    joined = replace(out, name="qkv.lora_B.parts")
    tape.emit(joined.name, (inner,), joined, saves=(inner,), weights=(weight,))
    return tape.emit(high.name, (joined,), out, what="qkv adapters' output", passes=(joined,))


def _padded(tape: Tape, outer: Value, output: Value) -> Value:
    """zero_pad: written where the adapted parts stand among zeros; what is written is saved, and where."""
    out = replace(output, name="qkv.lora.padded")
    width = tape.context.size(outer.dims[-1])
    index = tape.context.buffer("qkv.lora.index", (width,), "int64", "where adapted features stand")
    in_place = (tape.context.version or IN_PLACE_SINCE) >= IN_PLACE_SINCE
    zeros = () if in_place else (tape.scratch("qkv.lora.zeros", out),)
    source = outer
    if not in_place and tape.context.size(BATCH) > 1:  # rows are taken across sequences
        source = tape.emit(
            "qkv.lora.rows", (outer,), replace(outer, name="qkv.lora.rows"), what="qkv adapters' output, row by row"
        )
    return tape.emit(
        out.name, (source,), out, what="padded", beside=(index,), saves=(source, index.name), scratch=zeros
    )


# -- rotary embedding and core


def rope(tape: Tape, op: Op) -> None:
    """x * cos + rotated * sin in fp32, back, and joined with what is not turned, which may be nothing."""
    tape.module = "rope"
    fraction = op.attrs["fraction"]
    assert isinstance(fraction, float | int), fraction
    turned: list[Value] = []
    for name, tensor in zip(op.inputs, op.outputs, strict=True):
        source = tape[name]
        size = int(tape.context.size(source.dims[-1]) * fraction)
        part = tape.view(source, f"{tensor.name}.rot", (*source.rows, size), copies=True)
        wide = rotate(tape, part, Value(f"{tensor.name}.turned32", part.dims, "fp32"))
        turned.append(tape.cast(wide, source.dtype, f"{tensor.name}.turned"))
    for name, tensor, part in zip(op.inputs, op.outputs, turned, strict=True):
        source = tape[name]
        rest = tape.context.size(source.dims[-1]) - tape.context.size(part.dims[-1])
        joins = [part]
        if rest:
            joins.append(tape.view(source, f"{tensor.name}.pass", (*source.rows, rest), copies=True))
        made = Value(tensor.name, source.dims, source.dtype)
        tape.emit(made.name, joins, made, what=f"{tensor.name[0]} after rotary embedding", passes=joins)
    for index, part in enumerate(turned):
        tape.values[f"{index}.frame"] = part


def attention(tape: Tape, op: Op) -> Value:
    """sdpa, or written out where scores are capped: keys and values of every query head. q came out of a concatenation, heads first,
    which the kernel's output takes over and the reshape for the projection copies."""
    tape.module = op.module
    q, k, v = (tape[name] for name in op.inputs)
    if tape.context.size("kv_heads") < tape.context.size("heads") and "heads" not in k.dims:
        k, v = (_for_every_head(tape, one, f"{one.name}.repeated") for one in (k, v))
    if op.attrs["softcap"]:
        return _capped(tape, op, q, k, v)
    context = tape.context
    lse = context.buffer("lse", (BATCH, "heads", SEQ), "fp32", "log-sum-exp of the attention scores")
    output = tape.like(op.outputs[0], q.dtype)
    made = replace(output, name="attention.heads_first")
    tape.emit(
        made.name,
        (q, k, v),
        made,
        what="attention output",
        beside=(lse,),
        saves=(q, k, v, made, lse.name),
        backward_scratch=flash_backward(context, shared_heads=False),
    )
    return tape.emit("attention", (made,), output, what="attention output, tokens first", passes=(made,))


def _capped(tape: Tape, op: Op, q: Value, k: Value, v: Value) -> Value:
    """cap * tanh(q k / cap) with a mask of its own in every layer, softmax in fp32, and back."""

    def made(name: str, dtype: str = q.dtype) -> Value:
        return Value(f"attention.{name}", (BATCH, "heads", SEQ, SEQ), dtype)

    scores = tape.emit("attention.scores", (q, k), made("scores"), what="attention scores", saves=(q, k))
    divided = tape.scale(tape.scale(scores, "attention.scaled"), "attention.divided")
    bounded = made("tanh")
    tape.emit(bounded.name, (divided,), bounded, what="tanh of attention scores", saves=(bounded,))
    capped = tape.scale(bounded, "attention.capped")
    mask = tape.context.buffer("attention.mask", (SEQ, SEQ), q.dtype, "causal mask")
    masked = made("masked")
    tape.emit(masked.name, (capped,), masked, beside=(mask,), passes=(capped,))
    probs = made("probs32", "fp32")
    tape.emit(probs.name, (masked,), probs, what="attention probabilities", saves=(probs,))
    narrow = tape.cast(probs, q.dtype, "attention.probs")
    output = tape.like(op.outputs[0], q.dtype)
    product = Value("attention.product", output.dims, output.dtype)
    tape.emit(product.name, (narrow, v), product, saves=(narrow, v))
    return tape.emit("attention", (product,), output, what="attention output, tokens first")


def returns(tape: Tape) -> None:
    """The frame of attention ends, which named the joined projection, its parts and what was turned."""
    names = ("qkv.frame", "0.frame", "1.frame", "q_final", "k_final", "v", "context")
    tape.hold(*(tape.values[name] for name in names if name in tape.values))
