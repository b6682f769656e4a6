"""The causal language model's loss in transformers, version by version (loss/loss_utils.py; before 4.46 inside each model)."""

from __future__ import annotations

import re

from ullage.kernels import transformers_encoders
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Context
from ullage.kernels.transformers_parallel import gathered
from ullage.model.graph import BATCH, SEQ, Op

NEWEST = (5, 24)


def version_of(context: Context) -> tuple[int, int]:
    """(major, minor) of the transformers that the job names, or the newest that is modelled."""
    return release(context.version)


def release(version: str | None) -> tuple[int, int]:
    """(major, minor) of a job's ``stack_version``, or the newest that is modelled."""
    found = re.match(r"v?(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else NEWEST


def _upcasts(context: Context) -> bool:
    return version_of(context) >= (4, 31) and context.option("logits_upcast", True) is not False


def logits_type(context: Context) -> str:
    """Of the logits that the model returns."""
    return "fp32" if _upcasts(context) and version_of(context) < (4, 46) else context.compute


def loss(tape: Tape, op: Op) -> Value:
    """The logits stay named by the caller to the end of the loss, and so does the model's output, the normed stream.

    up to 4.30: no upcast (autocast runs cross entropy in fp32 all the same); 4.31 to 4.45: the model's own logits become fp32; from
    4.46 the loss casts while the caller keeps the 16-bit ones; up to 4.48 logits are shifted and copied, later the labels are padded.
    """
    context = tape.context
    tape.module = "loss"
    if "predicts" in op.attrs:
        result = transformers_encoders.loss(tape, op, cross_entropy)
        return _converted(tape, op, result, tape[op.inputs[0]])
    if context.option("loss_fn") == FUSED:
        return _fused(tape, op)
    if tape.family in _LABELS_AS_THEY_ARE:
        return _unshifted(tape, op)
    version = version_of(context)
    logits = _scaled(tape, gathered(tape, tape[op.inputs[0]]))
    if op.attrs["softcap"]:
        logits = _softcap(tape, logits)
    upcast = _upcasts(context)
    wide = tape.cast(logits, "fp32", "logits.fp32") if upcast else logits
    shifts = version < (4, 49)
    named = _shifted(tape, wide) if shifts else wide
    scored = tape.cast(named, "fp32", "logits.autocast") if context.autocast else named
    if not shifts:
        _padded_labels(tape)
    result = _cross_entropy(tape, op, scored)
    tape.hold(named, wide, *(tape[name] for name in _NAMED if name in tape.values))
    if version >= (4, 46) or not upcast:
        tape.hold(logits)
    return _converted(tape, op, result, logits)


_NAMED = ("head_in", "labels.padded")
_SCALES = frozenset({"cohere", "cohere2", "granite", "granitemoe"})
"""Models that multiply or divide the logits by a number, by 1 too."""


_LABELS_AS_THEY_ARE = frozenset({"t5"})


def _unshifted(tape: Tape, op: Op) -> Value:
    """Of an encoder and decoder, whose input is what is shifted: logits and labels as they are (models/t5/modeling_t5.py)."""
    logits = tape[op.inputs[0]]
    scored = tape.cast(logits, "fp32", "logits.autocast") if tape.context.autocast else logits
    result = cross_entropy(tape, op, scored)
    tape.hold(logits, scored, *(tape[name] for name in ("head_in", "encoded") if name in tape.values))
    return _converted(tape, op, result, logits)


def _scaled(tape: Tape, logits: Value) -> Value:
    return tape.scale(logits, "logits.scaled") if tape.family in _SCALES else logits


def _shifted(tape: Tape, logits: Value) -> Value:
    """logits[..., :-1, :].contiguous(): a copy, except of a single sequence, whose rows are contiguous already."""
    dims = (BATCH, tape.context.size(SEQ) - 1, logits.dims[-1])
    cut = tape.view(logits, "logits.cut", dims, copies=True)
    if tape.context.size(BATCH) == 1:
        return cut
    return tape.emit(
        "logits.shifted", (cut,), Value("logits.shifted", dims, logits.dtype), what="shifted logits", passes=(cut,)
    )


FUSED = "fused_crossentropy"
"""What llm-foundry calls flash-attn's cross entropy (models/mpt/modeling_mpt.py)."""


def _fused(tape: Tape, op: Op) -> Value:
    """One kernel that reads the logits as they are and keeps them, with a log-sum of each row; its backward makes their gradient in their
    own type (flash-attn flash_attn/losses/cross_entropy.py, inplace_backward left off). Labels are shifted, not logits."""
    logits = tape[op.inputs[0]]
    labels = tape.emit("shift_labels", (), Value("shift_labels", logits.dims[:-1], "int64"), what="shifted labels")
    rows = logits.rows
    lse = tape.context.buffer("lse", rows, "fp32", "log-sum-exp of the logits")
    losses = tape.context.buffer("losses", rows, "fp32", "loss of each token")
    output = tape.like(op.outputs[0], "fp32")
    result = tape.emit(
        op.name, (logits,), output, what="loss", scratch=(losses,), beside=(lse,), saves=(logits, labels, lse.name)
    )
    tape.hold(logits, labels)
    return result


def _padded_labels(tape: Tape) -> None:
    """One more label a sequence, so that the shift leaves as many as there are logits."""
    dims = (BATCH, tape.context.size(SEQ) + 1)
    tape.emit("labels.padded", (), Value("labels.padded", dims, "int64"), what="padded labels")


def _cross_entropy(tape: Tape, op: Op, logits: Value) -> Value:
    """Of the next tokens, by labels that are shifted."""
    labels = tape.emit("shift_labels", (), Value("shift_labels", logits.dims[:-1], "int64"), what="shifted labels")
    result = cross_entropy(tape, op, logits, labels)
    tape.hold(labels)
    return result


def cross_entropy(tape: Tape, op: Op, logits: Value, *labels: Value) -> Value:
    """log_softmax, whose output is saved, and the negative log-likelihood of the labels, where they are no part of the batch."""
    context = tape.context
    probs = Value(f"{op.name}.log_softmax", logits.dims, logits.dtype)
    weight = context.buffer(f"{op.name}.total_weight", (1,), logits.dtype, "total weight of the labels")
    tape.emit(probs.name, (logits,), probs, what="log-softmax of the logits", saves=(probs,))
    output = tape.like(op.outputs[0], logits.dtype)
    return tape.emit(op.name, (probs,), output, what="loss", beside=(weight,), saves=(probs, *labels, weight.name))


def _converted(tape: Tape, op: Op, result: Value, logits: Value) -> Value:
    """Under autocast accelerate copies the outputs to fp32 as the forward returns (convert_outputs_to_fp32): the logits too."""
    context = tape.context
    if (
        not context.autocast
        or tape[op.inputs[0]].dtype == "fp32"
        or context.option("convert_outputs_to_fp32", True) is False
    ):
        return result
    copy = tape.scratch("logits.output", logits, "fp32")
    last = tape.steps[-1]
    tape.steps.append(type(last)(name="convert_outputs", reads=(logits.name,), no_grad=(logits.name,), scratch=(copy,)))
    return result


def _softcap(tape: Tape, logits: Value) -> Value:
    """logits / cap, tanh, * cap: the frame rebinds its name each time."""
    divided = tape.scale(logits, "logits.divided")
    bounded = Value("logits.tanh", logits.dims, logits.dtype)
    tape.emit(bounded.name, (divided,), bounded, saves=(bounded,))
    return tape.scale(bounded, "logits.capped")
