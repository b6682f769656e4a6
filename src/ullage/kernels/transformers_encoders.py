"""What transformers' encoders have beside layers like a decoder's: patches of images, the first token, losses of tokens and classes."""

from __future__ import annotations

from collections.abc import Callable

from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value
from ullage.model.graph import Op

CrossEntropy = Callable[[Tape, Op, Value], Value]


def conv2d(tape: Tape, op: Op) -> Value:
    """nn.Conv2d as wide as its steps are: saves the image in the type that it runs in, and its weight. Its output is seen as tokens, so
    that the gradient comes in their order. An image that has the type already is the batch's."""
    tape.module = op.module
    compute = tape.context.compute
    pixels = _cast(tape, tape[op.inputs[0]], tape.weight_dtype)  # ViTModel.forward
    copies = {param: tape.cast_weight(param.name, param.dims, tape.weight_dtype) for param in reversed(op.params)}
    pixels = _cast(tape, pixels, compute)
    made = [copy for copy in copies.values() if copy is not None]
    own = [tape.weight(param.name, param.dims) for param, copy in copies.items() if copy is None]
    cast = () if pixels.name == tape.source else (pixels,)
    output = tape.like(op.outputs[0], compute)
    in_order = on_cuda(tape.context, "convolution backward")
    return tape.emit(
        op.name,
        (*cast, *made),
        output,
        what="patches",
        saves=(*cast, *made[1:]),
        no_grad=cast,
        weights=tuple(own),
        backward_scratch=(tape.scratch("patches.grad", output),) if in_order else (),
    )


def _cast(tape: Tape, images: Value, dtype: str) -> Value:
    """The batch in another type."""
    if images.dtype == dtype:
        return images
    return tape.emit(f"images.{dtype}", (), Value(f"images.{dtype}", images.dims, dtype), what=f"images in {dtype}")


def patch_positions(tape: Tape, op: Op) -> Value:
    """torch.cat of the first token and the patches, whose gradient is a view of the whole; plus the table of positions."""
    tape.module = op.module
    first, positions = op.params
    output = tape.like(op.outputs[0], tape.weight_dtype)
    patches = tape.cast(tape[op.inputs[0]], output.dtype, "patches.wide")
    joined = Value("tokens", output.dims, output.dtype)
    of_first = tape.weight(first.name, first.dims)
    tape.emit(joined.name, (patches,), joined, what="all tokens", passes=(patches,), weights=(of_first,))
    tape.emit(
        output.name,
        (joined,),
        output,
        what="embedding output",
        passes=(joined,),
        weights=(tape.weight(positions.name, positions.dims),),
        summed=(positions.name,),
    )
    return output


def first_token(tape: Tape, op: Op) -> Value:
    """hidden[:, 0]: a view, whose gradient is a whole stream of zeros with one token written."""
    tape.module = op.module
    return tape.view(tape[op.inputs[0]], op.outputs[0].name, op.outputs[0].dims, copies=True)


def loss(tape: Tape, op: Op, cross_entropy: CrossEntropy) -> Value:
    """Of the logits as they are, without an upcast of the model's own (models/bert/modeling_bert.py); autocast casts them for it."""
    logits = tape[op.inputs[0]]
    scored = tape.cast(logits, "fp32", f"{logits.name}.autocast") if tape.context.autocast else logits
    if op.attrs["predicts"] in ("words", "classes"):
        result = cross_entropy(tape, op, scored)
    else:  # mse_loss, binary_cross_entropy_with_logits
        output = tape.like(op.outputs[0], scored.dtype)
        result = tape.emit(op.name, (scored,), output, what="loss", saves=(scored,))
    tape.hold(scored, logits, _output(tape))
    return result


def _output(tape: Tape) -> Value:
    """What the model without its head returned."""
    return tape.values.get("head_in") or tape[tape.source]


def add_losses(tape: Tape, op: Op) -> Value:
    """The model's frame names both losses, and what they are of."""
    left, right = (tape[name] for name in op.inputs)
    total = tape.add(left, right, tape.like(op.outputs[0], left.dtype), "loss")
    tape.hold(left, right, _output(tape), *(tape[name] for name in ("logits", "next_logits", "pooled")))
    return total
