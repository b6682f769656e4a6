"""Liger's fused linear cross entropy: head, loss and their gradients chunk by chunk in the forward (ops/fused_linear_cross_entropy.py).

Up to 0.4 a chunk's logits are copied to fp32 and back; from 0.5 the kernel reads them as they are; from 0.6.2 what a chunk adds to the
head's gradient is a tensor of its own, and its fp32 copy another.
"""

from __future__ import annotations

from ullage.errors import Unsupported
from ullage.job.adapted import is_adapted
from ullage.kernels import fused
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer, Context
from ullage.kernels.transformers_linear import weight_of_head
from ullage.kernels.transformers_loss import version_of
from ullage.model.graph import BATCH, SEQ, Op

_RELEASED_WITH = (((4, 45), (0, 3)), ((4, 47), (0, 4)), ((4, 56), (0, 6, 1)))
"""transformers before the first is of the days of Liger's second: 4.45 of 2024-09-25, 4.47 of 2024-12-05, 4.56 of 2025-08-29."""
_NEWEST = (0, 8)
_HAS_NO_FUSED_LOSS = frozenset({"granite"})


def release(context: Context) -> tuple[int, ...]:
    """Liger's version of the days of the job's transformers, or the newest modelled."""
    version = version_of(context)
    return next((liger for before, liger in _RELEASED_WITH if version < before), _NEWEST)


def loss(tape: Tape, head: Op, op: Op) -> Value:
    """Keeps the gradient of the head's input and, where the head is trained, of its weight: no logits stay."""
    if tape.family in _HAS_NO_FUSED_LOSS or is_adapted(head):
        what = f"for {tape.family}" if tape.family in _HAS_NO_FUSED_LOSS else "with an adapter on the head"
        raise Unsupported(f"does not exist in Liger {what}", key="loss", value="fused-linear", remedy="use full")
    tape.module = "loss"
    stream = tape[head.inputs[0]]
    source = _shifted(tape, stream)
    name, dims = weight_of_head(head)
    narrow = tape.cast_weight(name, dims, tape.weight_dtype)
    scratch = _working(tape, source, dims, trained=name not in tape.frozen, casts=narrow is not None)
    result = fused.loss_with_gradients(tape, head, op, source, scratch=scratch, narrow=narrow)
    tape.hold(stream, source)
    return result


def _shifted(tape: Tape, stream: Value) -> Value:
    """Before transformers 4.49: hidden_states[..., :-1, :].contiguous(), a copy but of a single sequence; later the labels are padded."""
    if version_of(tape.context) >= (4, 49):
        return stream
    dims = (BATCH, tape.context.size(SEQ) - 1, stream.dims[-1])
    cut = tape.view(stream, "head_in.cut", dims, copies=True)
    if tape.context.size(BATCH) == 1:
        return cut
    return tape.emit(
        "head_in.shifted",
        (cut,),
        Value("head_in.shifted", dims, stream.dtype),
        what="shifted hidden states",
        passes=(cut,),
    )


def _working(
    tape: Tape, source: Value, dims: tuple[str | int, ...], *, trained: bool, casts: bool
) -> tuple[Buffer, ...]:
    """What a chunk works in at the worst: its logits, beside those of the chunk before, which a frame still names; or its share of
    the head's gradient."""
    context = tape.context
    compute = context.compute
    vocab, width = (context.size(dim) for dim in dims)
    tokens = context.numel(source.rows)
    share = -(-tokens // -(-vocab // width))
    rows = min(tokens, 1 << (share - 1).bit_length())  # triton.next_power_of_2
    copies = 2 if rows < tokens else 1
    logits = context.buffer(
        "chunk.logits", (rows, vocab), compute, "logits of one chunk, and of the one before", copies
    )
    losses = context.buffer("loss.rows", (tokens,), "fp32", "loss of each token")
    beside = [losses]
    if casts:
        beside.append(context.buffer("head.transposed", dims, compute, "autocast copy of the head, transposed"))
    if release(context) < (0, 5):
        return (
            logits,
            context.buffer("chunk.logits_fp32", (rows, vocab), "fp32", "logits of one chunk in fp32"),
            *beside,
        )
    if release(context) < (0, 6, 2) or not trained:
        return (logits, *beside)
    of_the_head = [
        context.buffer("chunk.logits", (rows, vocab), compute, "gradient of one chunk's logits"),
        context.buffer("chunk.head_grad", dims, compute, "what one chunk adds to the head's gradient"),
        context.buffer("chunk.head_grad_fp32", dims, "fp32", "what one chunk adds to the head's gradient, fp32"),
    ]
    return (*max(((logits,), tuple(of_the_head)), key=lambda parts: sum(one.bytes for one in parts)), *beside)
