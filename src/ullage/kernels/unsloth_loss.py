"""Unsloth's fused loss: head, cross entropy and the gradient of the hidden states in chunks, as many as the free memory asks for.

Source: unslothai/unsloth-zoo, fused_losses/cross_entropy_loss.py. Each chunk is compiled: its logits stay in 16 bits, and their gradient
is written over them (tests/trace/test_compiled_loss.py).
"""

from __future__ import annotations

import math

from ullage.errors import Unsupported
from ullage.job.adapted import is_adapted
from ullage.kernels import fused
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer
from ullage.kernels.transformers_linear import weight_of_head
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
    if is_adapted(head):
        raise Unsupported(
            "is not modelled with an adapter on the head", key="loss", value="fused-linear", remedy="use full"
        )
    tape.module = "loss"
    source = tape[head.inputs[0]]
    name, dims = weight_of_head(head)
    scratch = _chunk(tape, source, dims)
    if name not in tape.frozen:
        what = "what one chunk adds to the head's gradient"
        scratch = (*scratch, tape.context.buffer("chunk.head_grad", dims, tape.weight_dtype, what))
    result = fused.loss_with_gradients(tape, head, op, source, scratch=scratch)
    tape.hold(source)
    return result


def _chunk(tape: Tape, source: Value, dims: tuple[str | int, ...]) -> tuple[Buffer, ...]:
    """Its logits, over which the compiled chunk writes their gradient, and the hidden states' before it is copied to its place."""
    context = tape.context
    rows = -(-context.numel(source.rows) // (context.loss_chunks or 1))
    logits = context.buffer("chunk.logits", (rows, context.size(dims[0])), context.compute, "logits of one chunk")
    return logits, context.buffer("chunk.hidden_grad", (rows, source.dims[-1]), source.dtype)
