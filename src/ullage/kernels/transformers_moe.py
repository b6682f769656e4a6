"""Mixtures of experts in transformers 5.x: a router, and all experts in two grouped matmuls (integrations/moe.py).

Weights of all experts are one parameter each. Grouped matmuls know no autocast: they run in the weights' type. Versions before 5.0 loop
over the experts instead; what they save is close to this and is modelled by it, with what gpt_oss makes beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage.kernels import transformers_expert_weights as expert_weights
from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value, promote
from ullage.kernels.step import Buffer, Fit, Step, WeightGrad
from ullage.kernels.transformers_linear import SHARED, SHARED_ON_ROWS, flat, projected
from ullage.kernels.transformers_loss import version_of
from ullage.kernels.transformers_matmul import matmul
from ullage.model.graph import BATCH, ROUTED, SEQ_SP, Dim, Op

_TOKENS: tuple[Dim, ...] = (BATCH, SEQ_SP)
_FP32_ROUTERS = frozenset({"deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4_moe_lite", "kimi_k2"})
"""Models whose router computes in fp32 from the stream on."""


NAMED = ("router.logits", "router.indices", "scores")
"""What the router returns; the frame of the whole mixture names it to its end."""


def called(family: str, ops: tuple[Op, ...]) -> Iterator[Op]:
    """The order of the layer code: qwen2_moe runs its shared expert before the router, and its gate after the experts."""
    early = [op for op in ops if family in SHARED_ON_ROWS and op.module == SHARED and op.kind != "shared_gate"]
    for op in ops:
        if op.kind == "router":
            yield from early
        if op not in early:
            yield op


def router(tape: Tape, op: Op) -> Value:
    """Scores of every expert, their softmax, the best k and what makes them sum to one."""
    tape.module = op.module
    source = flat(tape, tape[op.inputs[0]])
    if tape.family in _FP32_ROUTERS:
        return _fp32_router(tape, op, source)
    param = op.params[0]
    logits = Value("router.logits", (*_TOKENS, "router"), tape.context.compute)
    matmul(tape, logits.name, source, [(param.name, param.dims)], logits, rows=True)
    wide = tape.cast(logits, "fp32", "router.fp32")
    if tape.family in _PICKS_FIRST:
        return _softmax_of_picked(tape, wide, tape[op.inputs[0]].dtype)
    probs = Value("router.probs", wide.dims, "fp32")
    tape.emit(probs.name, (wide,), probs, what="routing probabilities", saves=(probs,))
    best = _top_k(tape, probs)
    named = best  # by the router's frame; what is normalised in place is the same tensor
    if op.attrs["normed"]:
        best = _sum_to_one(tape, best, "router.best_normalised")
    scores = tape.cast(best, "fp32" if tape.family == "mixtral" else logits.dtype, "scores")
    tape.hold(named)
    return scores


_PICKS_FIRST = frozenset({"granitemoe"})
"""Models whose router takes the softmax of the best k logits alone."""


def _softmax_of_picked(tape: Tape, logits: Value, dtype: str) -> Value:
    """In the input's type; the logits are named to the mixture's end in fp32 (models/granitemoe/modeling_granitemoe.py)."""
    tape.values["router.logits"] = logits
    best = _top_k(tape, logits)
    probs = Value("router.probs", best.dims, "fp32")
    tape.emit(probs.name, (best,), probs, what="routing probabilities", saves=(probs,))
    scores = tape.cast(probs, dtype, "scores")
    tape.hold(best)
    return scores


def _top_k(tape: Tape, probs: Value) -> Value:
    best = Value("router.best", (*_TOKENS, "top_k"), "fp32")
    indices = tape.context.buffer("router.indices", best.dims, "int64", "experts of each token")
    tape.emit(best.name, (probs,), best, what="best routing probabilities", beside=(indices,), saves=(indices.name,))
    tape.define(Value(indices.name, (), "int64"))
    return best


def _sum_to_one(tape: Tape, best: Value, name: str) -> Value:
    """best /= best.sum(): in place, so that autograd keeps a copy of what it overwrites."""
    total = tape.emit("router.sum", (best,), Value("router.sum", (*_TOKENS, 1), best.dtype))
    kept = tape.context.buffer(
        "router.best_kept", best.dims, best.dtype, "routing probabilities before they are normalised"
    )
    out = Value(name, best.dims, best.dtype)
    quotient = tuple(tape.scratch(f"router.quotient{at}", best) for at in range(3))
    tape.steps.append(
        Step(
            name=name,
            reads=(best.name, total.name),
            writes=(kept,),
            aliases=((tape.buffer(out), best.name),),
            saves=(kept.name, total.name),
            backward_scratch=quotient,
            module=tape.module,
        )
    )
    return tape.define(out)


def _fp32_router(tape: Tape, op: Op, source: Value) -> Value:
    """DeepSeek: the stream and the weight in fp32, scores by sigmoid (or an fp32 softmax), choice by groups without gradients.

    Autocast casts both back, so that under it logits are in the compute type.
    """
    context = tape.context
    param = op.params[0]
    wide = tape.cast(source, "fp32", "router.input")
    logits = Value("router.logits", (*_TOKENS, "router"), context.compute if context.autocast else "fp32")
    if context.autocast:
        matmul(tape, logits.name, wide, [(param.name, param.dims)], logits, rows=True)
    else:
        weight: WeightGrad = context.weight(param.name, param.dims, "fp32", fusable=True)
        serves = {wide.name: (param.name,)}
        tape.emit(
            logits.name,
            (wide,),
            logits,
            what="router logits",
            saves=(wide,),
            weights=(weight,),
            serves=serves,
            op="matmul",
        )
    scored = tape.cast(logits, "fp32", "router.fp32") if tape.family == "deepseek_v2" else logits
    probs = Value("router.probs", logits.dims, scored.dtype)
    tape.emit(probs.name, (scored,), probs, what="routing scores", saves=(probs,))
    indices = context.buffer("router.indices", (*_TOKENS, "top_k"), "int64", "experts of each token")
    best = Value("router.best", (*_TOKENS, "top_k"), probs.dtype)
    choice = tuple(tape.scratch(f"router.choice{at}", probs, "fp32") for at in range(2))
    tape.emit(
        best.name,
        (probs,),
        best,
        what="scores of the chosen experts",
        beside=(indices,),
        saves=(indices.name,),
        scratch=choice,
    )
    tape.define(Value(indices.name, (), "int64"))
    if op.attrs["normed"]:
        best = _sum_to_one(tape, best, "router.best_normalised")
    return tape.scale(best, "scores")


def dispatch(tape: Tape, op: Op) -> Value:
    """Tokens sorted by expert: a copy of each row for each of its experts, and the weights in the same order."""
    tape.module = op.module
    source, scores = flat(tape, tape[op.inputs[0]]), tape[op.inputs[1]]
    slots: tuple[Dim, ...] = (ROUTED,)
    context = tape.context
    order = [
        context.buffer(f"dispatch.{name}", slots, "int64", f"dispatch: {name}")
        for name in ("expert_ids", "permutation")
    ]
    tape.emit("dispatch.sort", (), None, beside=tuple(order))
    tokens = context.buffer("dispatch.tokens", slots, "int64", "dispatch: token of each slot")
    rows = Value(op.outputs[0].name, op.outputs[0].dims, source.dtype)
    tape.emit(rows.name, (source,), rows, what="tokens sorted by expert", beside=(tokens,), saves=(tokens.name,))
    weights = Value("dispatch.weights", slots, scores.dtype)
    tape.emit(weights.name, (scores,), weights, saves=(order[1].name,))
    made = (
        []
        if on_cuda(context, "expert histogram")
        else [context.buffer("dispatch.histogram", slots, "fp32", "dispatch: expert ids as numbers")]
    )
    counts = context.buffer("dispatch.counts", ("experts",), "fp32", "dispatch: tokens of each expert")
    offsets = context.buffer("dispatch.offsets", ("experts",), "int32", "dispatch: where each expert's tokens end")
    tape.emit("dispatch.offsets.made", (), None, beside=(*made, counts, offsets))
    _keep_named(tape, order, made, counts, offsets)
    return rows


def _keep_named(tape: Tape, order: list[Buffer], made: list[Buffer], counts: Buffer, offsets: Buffer) -> None:
    """What the experts' frame names to its end; combine holds it."""
    for buffer in (*order, *made, counts, offsets):
        tape.define(Value(buffer.name, (), "int64"))


def grouped(tape: Tape, ops: tuple[Op, ...]) -> Value:
    """One grouped matmul over all experts: saves its rows and the offsets; gate and up are one."""
    first = ops[0]
    tape.module = first.module
    name = str(first.attrs["group"] or first.name)
    inner = first.params[0].dims[-1]
    width = sum(tape.context.size(op.params[0].dims[1]) for op in ops)
    whole = expert_weights.made(tape, first, name, ("experts", width, inner))
    dtype = whole.dtype if whole is not None else tape.weight_dtype
    beside = (whole,) if whole is not None else ()
    source = tape.cast(tape[first.inputs[0]], dtype, f"{first.name}.input")
    weight = tape.context.weight(first.params[0].name, ("experts", width, inner), dtype, fusable=True)
    single = len(ops) == 1
    output = Value(first.outputs[0].name if single else name, (ROUTED, width), dtype)
    offsets = ("dispatch.offsets",) if "dispatch.offsets" in tape.values else ()
    tape.emit(
        name if single else f"{name}.mm",
        (source, *beside),
        output,
        what=f"{name} output",
        saves=(source, *beside, *offsets),
        no_grad=beside if not expert_weights.is_adapted(first) else (),
        weights=(weight,),
        backward_scratch=_one_experts_gradient(tape, name, (width, inner)),
        serves={
            source.name: (weight.param, *(one.name for one in beside)),
            **{one.name: (source.name,) for one in beside},
        },
    )
    if not single:
        tape.views(output, tuple(replace_dims(op, output) for op in ops))
    return output


def _one_experts_gradient(tape: Tape, name: str, dims: tuple[Dim, ...]) -> tuple[Buffer, ...]:
    """Before 5.0 gpt_oss took each expert's matrix out of the one parameter (models/gpt_oss/modeling_gpt_oss.py): the gradient of one
    expert's is as large as that of all, with zeros, and is added to what the experts before it left."""
    if tape.family != "gpt_oss" or version_of(tape.context) >= (5, 0):
        return ()
    return (
        tape.context.buffer(f"{name}.expert_grad", ("experts", *dims), tape.weight_dtype, "gradient of one expert"),
    )


def replace_dims(op: Op, whole: Value) -> Value:
    return Value(op.outputs[0].name, op.outputs[0].dims, whole.dtype)


def combine(tape: Tape, op: Op) -> Value:
    """Each expert's rows times their weights, back in the tokens' order, summed over a token's experts, in the stream's type."""
    tape.module = op.module
    rows, source = tape[op.inputs[0]], tape["dispatch.weights"]
    dtype = promote(rows.dtype, source.dtype)
    weighted = Value("combine.weighted", rows.dims, dtype)
    narrowed = (Fit(rows.name, tape.scratch("combine.rows_grad", rows, dtype)),) if dtype != rows.dtype else ()
    total = tape.scratch("combine.weights_grad", source, dtype) if dtype != source.dtype else None
    tape.emit(
        weighted.name,
        (rows, source),
        weighted,
        what="experts' output, weighted",
        saves=(rows, source),
        fits=(*narrowed, Fit(source.name, tape.scratch("combine.product", rows, dtype), total)),
    )
    inverse = tape.context.buffer("combine.inverse", (ROUTED,), "int64", "combine: inverse permutation")
    numbers = tape.context.buffer("combine.numbers", (ROUTED,), "int64", "combine: numbers of the slots")
    tape.emit("combine.invert", (), None, beside=(inverse,), scratch=(numbers,))
    order = tape.define(Value(inverse.name, (), "int64"))
    ordered = Value("combine.ordered", rows.dims, dtype)
    tape.emit(
        ordered.name,
        (weighted, order),
        ordered,
        what="experts' output in the tokens' order",
        saves=(order,),
        no_grad=(order,),
    )
    summed = Value("combine.sum", op.outputs[0].dims, dtype)
    output = tape.like(
        op.outputs[0], tape["attention_in"].dtype if "attention_in" in tape.values else tape.context.residual
    )
    final = summed if dtype != output.dtype else output
    tape.emit(final.name, (ordered,), final, what="combined output of the experts")
    if final is not output:
        tape.cast(final, output.dtype, output.name)
    names = ("dispatch.expert_ids", "dispatch.permutation", "dispatch.histogram", "dispatch.counts", "dispatch.offsets")
    named = [tape[name] for name in names if name in tape.values]
    tape.hold(ordered, final, rows, source, order, tape["rows"], *named, *expert_weights.kept(tape))
    return tape.define(output)


def shared_gate(tape: Tape, op: Op) -> Value:
    """sigmoid(gate(x)) * shared expert's output (models/qwen2_moe/modeling_qwen2_moe.py)."""
    tape.module = op.module
    source, shared = flat(tape, tape[op.inputs[0]]), tape[op.inputs[1]]
    param = op.params[0]
    logit = Value("shared_gate.logit", (*_TOKENS, 1), tape.context.compute)
    raw = projected(tape, op, source, [(param.name, param.dims)], logit, rows=True)
    gate = Value("shared_gate.sigmoid", raw.dims, raw.dtype)
    tape.emit(gate.name, (raw,), gate, saves=(gate,))
    output = tape.like(op.outputs[0], shared.dtype)
    product = Fit(gate.name, tape.scratch("shared_gate.product", shared))
    return tape.emit("shared_gate.gated", (gate, shared), output, saves=(gate, shared), fits=(product,))
