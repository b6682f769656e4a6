"""Output projection and loss in torchtune: whole logits in fp32, or CEWithChunkedOutputLoss (modules/loss/ce_chunked_output_loss.py)."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value
from ullage.kernels.transformers_matmul import matmul
from ullage.model.graph import BATCH, SEQ, Dim, Op

LABELS_SHIFTED_SINCE = "2024-07-28"
"""Until then the recipe copied the shifted logits and named the copy through the backward (recipes/full_finetune_single_device.py)."""
DEFAULT_CHUNKS = 8
"""CEWithChunkedOutputLoss(num_output_chunks=8)."""


def chunk_sizes(tape: Tape) -> list[int]:
    """Tokens of a sequence in each chunk, as torch.chunk cuts."""
    tokens = tape.context.size(SEQ)
    each = -(-tokens // (tape.context.loss_chunks or DEFAULT_CHUNKS))
    return [min(each, tokens - start) for start in range(0, tokens, each)]


def head(tape: Tape, op: Op) -> Value:
    """Whole: one projection, cast to fp32 at once. Chunked: one projection a chunk, each of a copy where sequences lie side by side."""
    tape.module = op.module
    source = tape[op.inputs[0]]
    params = [(param.name, param.dims) for param in op.params]
    if tape.context.loss != "chunked":
        narrow = matmul(
            tape, "logits.narrow", source, params, Value("logits.narrow", op.outputs[0].dims, tape.context.compute)
        )
        return tape.cast(narrow, "fp32", op.outputs[0].name)
    sizes = chunk_sizes(tape)
    parts = tuple(Value(f"head_in.{index}", (BATCH, size, "hidden"), source.dtype) for index, size in enumerate(sizes))
    tape.views(source, parts)
    for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        rows = part
        if tape.context.size(BATCH) > 1:
            name = f"head_in.{index}.copy"
            rows = tape.emit(
                name, (part,), Value(name, part.dims, part.dtype), what="hidden states of a chunk", passes=(part,)
            )
        dims: tuple[Dim, ...] = (BATCH, size, "vocab")
        matmul(tape, f"logits.{index}", rows, params, Value(f"logits.{index}", dims, tape.context.compute))
    tape.hold(source)
    return source


def loss(tape: Tape, op: Op) -> Value:
    """The recipe names the logits until the loss is there, then lets go."""
    tape.module = "loss"
    if tape.context.loss == "chunked":
        return _chunked(tape, op)
    logits = tape[op.inputs[0]]
    if (tape.context.version or LABELS_SHIFTED_SINCE) < LABELS_SHIFTED_SINCE:
        logits = _shifted(tape, logits)
    output = tape.like(op.outputs[0], "fp32")
    result = (
        _compiled(tape, "loss", logits, output)
        if tape.context.option("compile_loss")
        else _eager(tape, "loss", logits, output)
    )
    tape.hold(logits)
    return result


def _shifted(tape: Tape, logits: Value) -> Value:
    """logits[..., :-1, :].contiguous(), a copy that lives as long as its own backward."""
    dims: tuple[Dim, ...] = (BATCH, tape.context.size(SEQ) - 1, "vocab")
    cut = tape.view(logits, "logits.cut", dims, copies=True)
    copy = Value("logits.shifted", dims, logits.dtype)
    return tape.emit(copy.name, (cut,), copy, what="shifted logits", saves=(copy,), passes=(cut,))


def _chunked(tape: Tape, op: Op) -> Value:
    """Chunk by chunk: cast up and cross entropy; the losses are added."""
    parts = [tape[f"logits.{index}"] for index in range(len(chunk_sizes(tape)))]
    total: Value | None = None
    for index, logits in enumerate(parts):
        output = Value(f"loss.{index}", (1,), "fp32")
        if tape.context.option("compile_loss"):
            one = _compiled(tape, output.name, logits, output)
        else:
            one = _eager(tape, output.name, tape.cast(logits, "fp32", f"logits.{index}.fp32"), output)
        total = one if total is None else tape.add(total, one, Value(f"total.{index}", (1,), "fp32"))
    assert total is not None
    result = tape.emit(op.name, (total,), tape.like(op.outputs[0], "fp32"), what="loss")
    tape.hold(*parts)
    return result


def _eager(tape: Tape, name: str, logits: Value, output: Value) -> Value:
    scores = Value(f"{name}.log_softmax", logits.dims, logits.dtype)
    tape.emit(scores.name, (logits,), scores, what="log-softmax of the logits", saves=(scores,))
    return tape.emit(output.name, (scores,), output, saves=(scores,))


def _compiled(tape: Tape, name: str, logits: Value, output: Value) -> Value:
    """Inductor keeps the logits and two numbers a row; one kernel of its backward makes their gradient. nll_loss_backward's scatter into
    zeros is no tensor since torch 2.4 (_inductor/fx_passes/post_grad.py, scatter_upon_const_tensor)."""
    rows = tape.context.buffer(
        f"{name}.rows", logits.dims[:-1], "fp32", "maximum and log-sum of each row of logits", copies=2
    )
    return tape.emit(output.name, (logits,), output, beside=(rows,), saves=(logits, rows.name))
