"""Cross entropies of torchtitan (components/loss.py), from whole logits in fp32 to chunks that never see them all."""

from __future__ import annotations

from ullage.kernels.step import Buffer, Context, Step
from ullage.kernels.torchtitan_captured import is_captured
from ullage.kernels.torchtitan_version import LOGITS_DROPPED_SINCE, LOSS_UPCASTS_SINCE, before
from ullage.model.graph import BATCH, SEQ, Op

LOGITS = (BATCH, SEQ, "vocab")
DEFAULT_CHUNKS = 8


def loss(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    if context.loss == "fused-linear":
        return [_chunked_linear(op, context)]
    if context.loss == "chunked":
        return [_chunked(op, context)]
    if _is_compiled(context):
        return [_compiled(op, context)]
    if context.loss.startswith("vocab-parallel") and context.tp > 1:
        return _loss_parallel(op, context)
    return _whole(op, context)


def _is_compiled(context: Context) -> bool:
    """By itself, or in one function with the model, which ``compile_scope`` says in words: "whole model and loss" (torchao
    benchmarks/quantized_training/pretrain_llama2.py, get_loss)."""
    with_the_model = context.compile and "loss" in str(context.option("compile_scope", ""))
    return bool(context.option("compile_loss")) or with_the_model


def _upcast(op: Op, context: Context) -> Step:
    whole = context.buffer("logits_fp32", LOGITS, "fp32", "logits in fp32")
    return Step(name="loss.upcast", reads=op.inputs, writes=(whole,))


def _held(op: Op, context: Context) -> tuple[str, ...]:
    """What the caller still names while the loss runs: the logits as the model returned them. In a captured graph there is no caller."""
    if is_captured(context):
        return ()
    return ("logits_fp32",) if before(context, LOSS_UPCASTS_SINCE) else (*op.inputs, "logits_fp32")


def _whole(op: Op, context: Context) -> list[Step]:
    """fp32 copy, log-softmax (saved); in the backward its gradient twice over, then one in bf16."""
    output = context.tensor(op.outputs[0], "loss")
    log_softmax = context.buffer("log_softmax", LOGITS, "fp32", "log-softmax of the logits")
    held = _held(op, context)
    stays = ("logits_fp32",) if before(context, LOGITS_DROPPED_SINCE) else ()
    return [
        _upcast(op, context),
        Step(name="loss.log_softmax", reads=("logits_fp32",), writes=(log_softmax,), saves=(log_softmax.name, *stays)),
        Step(
            name="loss",
            reads=(log_softmax.name, *held),
            writes=(output,),
            saves=(log_softmax.name,),
            no_grad=held,
            moves=(output.bytes, log_softmax.bytes),  # one number a row; its gradient is filled with zeros
        ),
    ]


def _loss_parallel(op: Op, context: Context) -> list[Step]:
    """DTensor's loss_parallel: fp32 copy, shifted, exponential and result in the forward; three more beside the saved one in the
    backward (torch distributed/tensor/parallel/loss.py). A captured graph lets go of each when the next is there."""
    output = context.tensor(op.outputs[0], "loss")
    log_softmax = context.buffer("log_softmax", LOGITS, "fp32", "log-softmax of the logits of this rank")
    shifted = context.buffer("shifted", LOGITS, "fp32", "logits less their maximum")
    spare = context.buffer("loss_parallel.exp", LOGITS, "fp32", "exponential of the log-softmax")
    product = context.buffer("loss_parallel.update", LOGITS, "fp32", "gradient before the softmax is subtracted")
    captured = is_captured(context)
    held = _held(op, context)
    return [
        _upcast(op, context),
        Step(
            name="loss.log_softmax",
            reads=("logits_fp32",),
            writes=(log_softmax,),
            saves=(log_softmax.name,),
            scratch=() if captured else (shifted,),
            backward_scratch=(spare,) if captured else (spare, product),
        ),
        Step(
            name="loss",
            reads=(log_softmax.name, *held),
            writes=(output,),
            saves=(log_softmax.name,),
            no_grad=held,
            passes=(log_softmax.name,),
        ),
    ]


def _compiled(op: Op, context: Context) -> Step:
    """Inductor fuses upcast and log-softmax: the bf16 logits stay with two fp32 numbers a row, the gradient is written in bf16."""
    output = context.tensor(op.outputs[0], "loss")
    rows = context.buffer("loss.rows", (BATCH, SEQ), "fp32", "maximum and log-sum of each row of logits", copies=2)
    return Step(name="loss", reads=op.inputs, writes=(output, rows), saves=(*op.inputs, rows.name))


def _chunks(context: Context) -> int:
    return context.loss_chunks or DEFAULT_CHUNKS


def _part(name: str, context: Context, dtype: str | None, what: str) -> Buffer:
    whole = context.buffer(name, LOGITS, dtype, what)
    return Buffer(name, -(-whole.bytes // _chunks(context)), what, f"({whole.formula}) / {_chunks(context)} chunks")


def _chunked(op: Op, context: Context) -> Step:
    """Chunks of finished logits: only the upcast copy is a chunk's; every chunk's log-softmax stays; gradients of the chunks are joined."""
    output = context.tensor(op.outputs[0], "loss")
    log_softmax = context.buffer("log_softmax", LOGITS, "fp32", "log-softmax of the chunks of logits")
    return Step(
        name="loss",
        reads=op.inputs,
        writes=(output, log_softmax),
        saves=(log_softmax.name,),
        scratch=(_part("chunk.upcast", context, "fp32", "one chunk of logits in fp32"),),
        backward_scratch=(
            _part("chunk.grad", context, "fp32", "gradient of one chunk's log-softmax"),
            _part("chunk.grad_logits", context, "fp32", "gradient of one chunk's fp32 logits"),
        ),
    )


def _chunked_linear(op: Op, context: Context) -> Step:
    """ChunkedCELoss: head, loss and backward chunk by chunk inside the forward; what stays is the gradient of the hidden states.

    Beside one chunk's logits: the chunks' copies of the hidden states, their gradient in fp32, and the head's unsharded gradient,
    accumulated in fp32 until the last chunk reduces it.
    """
    output = context.tensor(op.outputs[0], "loss")
    hidden = (BATCH, SEQ, "hidden")
    source = "head_in"
    scratch = [
        context.buffer("chunk.hidden", hidden, what="hidden states, copied into chunks"),
        context.buffer("chunk.hidden_grad", hidden, "fp32", "gradient of the hidden states, fp32"),
        context.buffer("chunk.head_grad", ("vocab", "hidden"), "fp32", "gradient of the output projection, unsharded"),
        _part("chunk.logits", context, None, "logits of one chunk"),
        _part("chunk.log_softmax", context, "fp32", "log-softmax of one chunk"),
        _part("chunk.grad", context, "fp32", "gradient of one chunk's log-softmax"),
        _part("chunk.grad_fp32", context, "fp32", "gradient of one chunk's logits"),
    ]
    grad = context.buffer("hidden_grad", hidden, what="gradient of the hidden states")
    hands = ((source, grad.name),)
    return Step(
        name="loss", reads=(source,), writes=(output, grad), saves=(grad.name,), scratch=tuple(scratch), hands=hands
    )
