"""The head and its loss in one kernel that makes no logits: cut cross entropy, as its patch puts it into transformers' models.

Source: apple/ml-cross-entropy, cut_cross_entropy/cce.py, cce_lse_forward.py, cce_backward.py (arXiv 2411.09009).
"""

from __future__ import annotations

from ullage.errors import Unsupported
from ullage.kernels.eager import Tape, Value
from ullage.kernels.transformers_linear import weight_of_head
from ullage.model.graph import Op


def is_cut(tape: Tape, op: Op) -> bool:
    """Whether an op is the head of a loss that takes its input instead of its logits."""
    return tape.context.loss == "fused-linear" and op.name == "lm_head"


def loss(tape: Tape, head: Op, op: Op) -> Value:
    """Keeps the head's input, a log-sum of each row and a mean logit of each word, by which the backward orders the words; that makes the
    input's gradient, and the weight's where it is trained, in the compute type."""
    context = tape.context
    if context.tp > 1:
        raise Unsupported("is not modelled under tensor parallelism", key="loss", value="fused-linear")
    tape.module = "loss"
    source = tape[head.inputs[0]]
    cast = tape.cast(source, context.compute, "head_in.cut") if context.autocast else source
    name, dims = weight_of_head(head)
    stored = tape.weight_dtype
    lse = context.buffer("lse", cast.rows, "fp32", "log-sum-exp of the logits")
    mean = context.buffer("logit_avg", ("vocab",), "fp32", "mean logit of each word")
    narrow = (
        () if stored == cast.dtype else (context.buffer(f"{name}.cut", dims, cast.dtype, f"{name} in {cast.dtype}"),)
    )
    narrow_grad = tuple(context.buffer(f"{one.name}.grad", dims, cast.dtype) for one in narrow)
    order = context.buffer("vocab_ordering", ("vocab",), "int32", "words by their mean logit")
    made = tape.emit(
        op.name,
        (cast,),
        tape.like(op.outputs[0], "fp32"),
        what="loss",
        beside=(lse, mean, *narrow),
        saves=(cast, lse.name, mean.name, *(one.name for one in narrow)),
        backward_scratch=(order, *narrow_grad),
        weights=(context.weight(name, dims, stored),),
        serves={one.name: (name,) for one in narrow_grad},
    )
    tape.hold(source)
    return made
