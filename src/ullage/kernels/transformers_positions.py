"""Attention of T5's code (models/t5/modeling_t5.py): scores with a term of the positions added, queries and keys of several lengths.

The first layer of a stack makes the terms and all layers read them, so that each makes a gradient for them: whole scores of it, summed over
the sequences. Attention to the encoder has zeros for terms.
"""

from __future__ import annotations

from ullage.kernels import transformers_masks as masks
from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Buffer, Context, Fit
from ullage.model.graph import BATCH, Dim, Op

BIAS_ALIGNMENT = 16
"""torch rounds rows of the gradient of a bias up to this (native/transformers/cuda/attention_backward.cu)."""
MASK_ALIGNMENT = 8
"""And copies a bias whose rows are no multiple of this (native/transformers/attention.cpp, pad_bias)."""


def positions(tape: Tape, op: Op) -> Value:
    """The look-up of each pair's bucket saves the buckets; zeros have the type of the queries."""
    tape.module = op.module
    made, context = op.outputs[0], tape.context
    what = "terms of the positions"
    if not op.params:
        zeros = Value(made.name, made.dims, context.compute)
        return tape.emit(op.name, (), zeros, what=what)
    pairs: tuple[Dim, ...] = made.dims[1:3]
    buckets = context.buffer(f"{op.name}.buckets", pairs, "int64", "buckets of relative positions")
    at_once = 3 if op.attrs["causal"] else 4
    param = op.params[0]
    return tape.emit(
        op.name,
        (),
        tape.like(made, tape.weight_dtype),
        what=what,
        beside=(buckets,),
        saves=(buckets.name,),
        scratch=tuple(context.buffer(f"{op.name}.pairs{one}", pairs, "int64") for one in range(at_once)),
        weights=(tape.weight(param.name, param.dims),),
    )


def mask(tape: Tape, op: Op) -> None:
    """Of the decoder's own tokens, where attention is eager; sdpa is told by a flag."""
    made, context = op.outputs[0], tape.context
    if context.attention != "eager":
        return
    added = Value(made.name, made.dims, context.residual)
    order = context.buffer(f"{op.name}.order", (1, *made.dims[1:]), "bool")
    numbers = tuple(context.buffer(f"{op.name}.{which}", (1,), added.dtype) for which in ("zero", "lowest"))
    tape.emit(op.name, (), added, what="attention mask", scratch=(order, *numbers))


def attention(tape: Tape, op: Op) -> Value:
    tape.module = op.module
    return _eager(tape, op) if masks.is_eager(tape.context, op) else _sdpa(tape, op)


def _terms(tape: Tape, op: Op) -> Value:
    return tape[str(op.attrs["positions"])]


def _asks(tape: Tape, op: Op) -> bool:
    return str(op.attrs["positions"]) in tape.asking


def _pairs(op: Op) -> tuple[Dim, ...]:
    queries, keys = op.attrs["queries"], op.attrs["keys"]
    assert isinstance(queries, str)
    assert isinstance(keys, str)
    return (queries, keys)


# -- eager


def _eager(tape: Tape, op: Op) -> Value:
    context, terms = tape.context, _terms(tape, op)
    q, k, v = (tape[name] for name in op.inputs[:3])
    name = op.name

    def scores(which: str, dtype: str) -> Value:
        return Value(f"{name}.{which}", (BATCH, "heads", *_pairs(op)), dtype)

    query, key = _operand(tape, q, f"{name}.q"), _operand(tape, k, f"{name}.k")
    raw = tape.emit(
        f"{name}.scores",
        (query, key),
        scores("scores", context.compute),
        what="attention scores",
        saves=(query, key),
    )
    weights = tape.scale(raw, f"{name}.scaled")
    summed = scores("biased", promote(weights.dtype, terms.dtype))
    asks = _asks(tape, op)
    alone = context.size(BATCH) == 1 and summed.dtype == terms.dtype
    weights = tape.emit(
        summed.name,
        (weights, terms),
        summed,
        passes=[one for one, same in ((weights, weights.dtype == summed.dtype), (terms, asks and alone)) if same],
        no_grad=() if asks else (terms,),
        summed=(terms.name,) if asks and not alone else (),
    )
    if op.attrs["causal"]:
        added = tape[op.inputs[4]]
        masked = scores("masked", promote(weights.dtype, added.dtype))
        weights = tape.emit(masked.name, (weights, added), masked, passes=(weights,), no_grad=(added,))
    widens = context.autocast and on_cuda(context, "autocast of layer norm and softmax")
    wide = tape.cast(weights, "fp32", f"{name}.scores32") if widens else weights
    probs = scores("probs", wide.dtype)
    tape.emit(probs.name, (wide,), probs, what="attention probabilities", saves=(probs,))
    if op.attrs["dropout"]:
        probs = _dropout(tape, probs, scores("dropped", probs.dtype))
    tape.values[f"{name}.weights"] = tape.values["attention.weights"] = probs
    narrow = tape.cast(probs, context.compute, f"{name}.probs16")
    value = _operand(tape, v, f"{name}.v")
    output = tape.like(op.outputs[0], context.compute)
    product = Value(f"{name}.product", output.dims, output.dtype)
    tape.emit(product.name, (narrow, value), product, saves=(narrow, value))
    return tape.emit(name, (product,), output, what="attention output")


def _operand(tape: Tape, value: Value, name: str) -> Value:
    """Of a bmm: a copy, heads before tokens; one sequence's heads are a batch of matrices as they lie."""
    if tape.context.size(BATCH) == 1:
        return value
    return tape.emit(name, (value,), Value(name, value.dims, value.dtype), passes=(value,))


def _dropout(tape: Tape, source: Value, output: Value) -> Value:
    dtype = "bool" if on_cuda(tape.context, "dropout mask") else source.dtype
    mask = tape.context.buffer(f"{output.name}.mask", source.dims, dtype, "dropout mask")
    return tape.emit(output.name, (source,), output, beside=(mask,), saves=(mask.name,))


# -- sdpa


def _sdpa(tape: Tape, op: Op) -> Value:
    """The memory-efficient kernel, the only one of CUDA's that takes terms: as a copy of its own in every layer, whose gradient it makes
    for each sequence (integrations/sdpa_attention.py, create_position_bias_mask)."""
    context, asks = tape.context, _asks(tape, op)
    q, k, v = (tape[name] for name in op.inputs[:3])
    terms = _bias(tape, op)
    lse = context.buffer(
        f"{op.name}.lse", (BATCH, "heads", _pairs(op)[0]), "fp32", "log-sum-exp of the attention scores"
    )
    output = tape.like(op.outputs[0], context.compute)
    made = context.buffer(
        f"{op.name}.bias_grad",
        (BATCH, "heads", _pairs(op)[0], _rounded(context, _pairs(op)[1], BIAS_ALIGNMENT)),
        context.compute,
        "gradient of the terms of the positions, of each sequence",
    )
    return tape.emit(
        op.name,
        (q, k, v, terms),
        output,
        what="attention output",
        beside=(lse,),
        saves=(q, k, v, terms, output, lse.name),
        no_grad=() if asks else (terms,),
        fits=(Fit(terms.name, made),) if asks else (),
        backward_scratch=_sums(tape, op),
        op="attention",
    )


def _bias(tape: Tape, op: Op) -> Value:
    """What the kernel adds: the terms of each pair of tokens, heads first; causal order is put into them."""
    context, terms, name = tape.context, _terms(tape, op), f"{op.name}.bias"
    silent = () if _asks(tape, op) else (terms,)
    if op.attrs["causal"]:
        order = context.buffer(f"{name}.order", _pairs(op), "bool", "causal order")
        ordered = Value(f"{name}.ordered", terms.dims, terms.dtype)
        terms = tape.emit(ordered.name, (terms,), ordered, beside=(order,), saves=(order.name,))
    queries, keys = _pairs(op)
    if queries == keys:  # looked up heads last; zeros are as the kernel has them
        laid = Value(name, terms.dims, terms.dtype)
        terms = tape.emit(name, (terms,), laid, what="terms of the positions, heads first", passes=(terms,))
        tape.hold(terms)
    terms = tape.cast(terms, context.compute, f"{name}.{context.compute}")
    rounded = _rounded(context, keys, MASK_ALIGNMENT)
    if rounded == context.size(keys) or not on_cuda(context, "attention mask"):
        return terms
    padded = Value(f"{name}.padded", (1, queries, rounded, "heads"), terms.dtype)
    return tape.emit(padded.name, (terms,), padded, what="padded terms of the positions", no_grad=silent and (terms,))


def _rounded(context: Context, dim: Dim, alignment: int) -> int:
    return -(-context.size(dim) // alignment) * alignment


def _sums(tape: Tape, op: Op) -> tuple[Buffer, ...]:
    if not on_cuda(tape.context, "attention backward"):
        return ()
    name = f"{op.name}.softmax_d"
    return (tape.context.buffer(name, (BATCH, "heads", _pairs(op)[0]), "fp32", "row sums of the attention backward"),)


# -- norm, and the ends


def scale(tape: Tape, op: Op) -> Value:
    """A number times the stream."""
    return tape.scale(tape[op.inputs[0]], op.outputs[0].name)
