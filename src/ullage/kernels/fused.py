"""What kernels written around transformers' models share: a norm that keeps its input, a loss that makes gradients in the forward."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer
from ullage.kernels.transformers_linear import weight_of_head
from ullage.model.graph import Op

HEAD_GRAD = "head.grad"


def rms_norm(tape: Tape, op: Op, source: Value, *, in_place: bool, sums: tuple[Buffer, ...] = ()) -> Value:
    """Keeps its input and one number a row. in_place: its gradient is written over the output's. sums: what the gradient of its weight is
    made from."""
    tape.module = op.module
    rstd = tape.context.buffer(f"{op.name}.rstd", source.rows, "fp32", f"{op.name} reciprocal root mean square")
    weights = tuple(tape.weight(param.name, param.dims) for param in op.params)
    return tape.emit(
        op.name,
        (source,),
        Value(op.outputs[0].name, op.outputs[0].dims, source.dtype),
        what=f"{op.name} output",
        beside=(rstd,),
        saves=(source, rstd.name),
        passes=(source,) if in_place else (),
        backward_scratch=sums,
        weights=weights,
        serves={one.name: tuple(weight.param for weight in weights) for one in sums},
    )


def loss_with_gradients(
    tape: Tape, head: Op, op: Op, source: Value, *, scratch: tuple[Buffer, ...], narrow: Value | None = None
) -> Value:
    """Head and loss in one: keeps the gradient of the head's input, and of its weight where that is trained, and no logits.

    scratch: what it works in. narrow: autocast's copy of the weight, which it reads.
    """
    name, dims = weight_of_head(head)
    trained = name not in tape.frozen
    stored = tape.weight_dtype
    made = [tape.scratch("head_in.grad", source)]
    hands = {source.name: "head_in.grad"}
    if trained:
        made.append(tape.context.buffer(HEAD_GRAD, dims, stored, "gradient of the head, made with the loss"))
        hands[name] = HEAD_GRAD
    copies = () if narrow is None else (narrow,)
    return tape.emit(
        op.name,
        (source, *copies),
        tape.like(op.outputs[0], "fp32"),
        what="loss",
        beside=tuple(made),
        saves=tuple(one.name for one in made),
        no_grad=copies,
        scratch=scratch,
        weights=(tape.context.weight(name, dims, stored),),
        hands=hands,
        serves={HEAD_GRAD: (name,)} if trained else {},
    )
