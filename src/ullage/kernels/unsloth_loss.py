"""Unsloth's fused loss: head, cross entropy and the gradient of the hidden states in chunks, as many as the free memory asks for.

Source: unslothai/unsloth-zoo, fused_losses/cross_entropy_loss.py. Each chunk is compiled: its logits stay in 16 bits and their gradient
is another such tensor.
"""

from __future__ import annotations

import math

from ullage.errors import Unsupported
from ullage.kernels import transformers_adapters as adapters
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer
from ullage.model.graph import Op
from ullage.units import GIB

_TARGET_BYTES = 4 * GIB
"""A chunk's logits in fp32 take half of what is free, and no more than this (_get_chunk_multiplier)."""


def chunks(tokens: int, vocab: int, free_bytes: int) -> int:
    """In how many chunks ``tokens`` are scored: one, or a multiple of four."""
    target = min(free_bytes // 2, _TARGET_BYTES)
    exact = 4 * tokens * vocab / max(target, 1)
    return 1 if exact <= 1 else math.ceil(exact / 4) * 4


def loss(tape: Tape, head: Op, op: Op) -> Value:
    """Keeps the gradient of the head's input, and of its weight where that is trained."""
    context = tape.context
    if adapters.is_adapted(head):
        raise Unsupported(
            "is not modelled with an adapter on the head", key="loss", value="fused-linear", remedy="use full"
        )
    tape.module = "loss"
    source = tape[head.inputs[0]]
    shared = head.attrs.get("shared")
    name, dims = (
        (shared, ("vocab", "hidden")) if isinstance(shared, str) else (head.params[0].name, head.params[0].dims)
    )
    stored = tape.weight_dtype
    made = [tape.scratch("head_in.grad", source)]
    hands = {source.name: "head_in.grad"}
    scratch = list(_chunk(tape, source, dims))
    if name not in tape.frozen:
        made.append(context.buffer("head.grad", dims, stored, "gradient of the head, made with the loss"))
        scratch.append(context.buffer("chunk.head_grad", dims, stored, "what one chunk adds to the head's gradient"))
        hands[name] = "head.grad"
    result = tape.emit(
        op.name,
        (source,),
        tape.like(op.outputs[0], "fp32"),
        what="loss",
        beside=tuple(made),
        saves=tuple(one.name for one in made),
        scratch=tuple(scratch),
        weights=(context.weight(name, dims, stored),),
        hands=hands,
        serves={"head.grad": (name,)},
    )
    tape.hold(source)
    return result


def _chunk(tape: Tape, source: Value, dims: tuple[str | int, ...]) -> tuple[Buffer, ...]:
    context = tape.context
    rows = -(-context.numel(source.rows) // (context.loss_chunks or 1))
    vocab = context.size(dims[0])
    logits = context.buffer("chunk.logits", (rows, vocab), context.compute, "logits of one chunk")
    grad = context.buffer("chunk.logits_grad", (rows, vocab), context.compute, "gradient of one chunk's logits")
    return logits, grad, tape.context.buffer("chunk.hidden_grad", (rows, source.dims[-1]), source.dtype)
