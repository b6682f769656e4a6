"""Output projection and loss in litgpt (model.py, lm_head_chunk_size; utils.py, chunked_cross_entropy), under Lightning Fabric.

Fine-tuning with adapters projects 128 tokens of every sequence at a time and keeps all logits; full fine-tuning projects all at once.
Fabric makes fp32 of what a module returns (lightning.fabric, plugins/precision/half.py and bitsandbytes.py, convert_output), so that the
16-bit logits go and fp32 ones stay, named by the training loop.
"""

from __future__ import annotations

from ullage.frozen import replace
from ullage.kernels import transformers_linear
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer
from ullage.model.graph import BATCH, SEQ, Dim, Op

NAMED = "fp32 logits"
"""What a ledger calls them."""
CHUNK = 128
"""Tokens (finetune/lora.py, lm_head_chunk_size)."""


def chunk_sizes(tape: Tape) -> list[int]:
    """Tokens of a sequence in each chunk: litgpt's own size where it makes as many chunks as the job says."""
    tokens = tape.context.size(SEQ)
    chunks = tape.context.loss_chunks or -(-tokens // CHUNK)
    each = CHUNK if -(-tokens // CHUNK) == chunks else -(-tokens // chunks)
    return [min(each, tokens - start) for start in range(0, tokens, each)]


def _projects_in_chunks(tape: Tape) -> bool:
    return tape.context.loss == "chunked" and tape.context.option("lm_head_chunked", True) is not False


def head(tape: Tape, op: Op) -> Value:
    tape.module = op.module
    source = tape[op.inputs[0]]
    if not _projects_in_chunks(tape):
        logits = _capped(tape, transformers_linear.linear(tape, op))
        return _returned(tape, [logits])[0]
    sizes = chunk_sizes(tape)
    parts = tuple(Value(f"head_in.{index}", (BATCH, size, "hidden"), source.dtype) for index, size in enumerate(sizes))
    tape.views(source, parts)
    made = []
    for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        dims: tuple[Dim, ...] = (BATCH, size, "vocab")
        made.append(_capped(tape, transformers_linear.of_chunk(tape, op, part, f"logits.{index}", dims)))
    tape.hold(source)
    _returned(tape, made)
    return source


def _capped(tape: Tape, logits: Value) -> Value:
    """Gemma 2's cap: tanh(x / cap) * cap."""
    if tape.family not in _CAPS:
        return logits
    divided = tape.scale(logits, f"{logits.name}.divided")
    bounded = Value(f"{logits.name}.tanh", logits.dims, logits.dtype)
    tape.emit(bounded.name, (divided,), bounded, what="tanh of the logits", saves=(bounded,))
    return tape.scale(bounded, f"{logits.name}.capped")


_CAPS = frozenset({"gemma2"})


LONGEST_FIRST_UNTIL = "2024-02-29"
"""Until then the first batch had the longest sample, and what came before or after it was shorter (finetune/lora.py)."""


def _before(tape: Tape, logits: list[Value]) -> tuple[Buffer, ...]:
    """The fp32 logits of the micro-batch before, which the loop names until it is given new ones."""
    if (tape.context.version or LONGEST_FIRST_UNTIL) < LONGEST_FIRST_UNTIL:
        return ()
    what = "fp32 logits of the micro-batch before"
    return tuple(
        tape.context.buffer(f"{one.name}.before", one.dims, "fp32", what) for one in logits if one.dtype != "fp32"
    )


def _returned(tape: Tape, logits: list[Value]) -> list[Value]:
    """Each becomes fp32, for which the loop's name stands to the backward; the 16-bit ones go when all have."""
    found = []
    before = _before(tape, logits)
    if before:  # from the first layer on, but nowhere as much is there as in the last projection and behind it
        last = max(at for at, step in enumerate(tape.steps) if step.name.endswith("lm_head"))
        tape.steps[last:] = [replace(step, scratch=(*step.scratch, *before)) for step in tape.steps[last:]]
    for index, one in enumerate(logits):
        name = f"logits.{index}.fp32"
        wide = Value(name, one.dims, "fp32")
        if one.dtype == "fp32":
            found.append(tape.define(Value(name, one.dims, one.dtype)))
            tape.values[name] = one
            continue
        scratch = before if one is logits[-1] else ()
        found.append(tape.emit(name, (one,), wide, what=NAMED, scratch=scratch))
    tape.hold(*logits)
    tape.values["logits"] = found[0]
    return found


def loss(tape: Tape, op: Op) -> Value:
    tape.module = "loss"
    if _projects_in_chunks(tape):
        parts = [tape[f"logits.{index}.fp32"] for index in range(len(chunk_sizes(tape)))]
        parts[-1] = _without_last(tape, parts[-1])
        return _mean(tape, op, parts)
    logits = tape["logits.0.fp32"]
    if tape.context.loss != "chunked":  # pretraining: labels come shifted, one cross entropy of all
        return _mean(tape, op, [logits])
    cut = _without_last(tape, logits)
    rows: list[Value] = []
    for index, size in enumerate(chunk_sizes(tape)):
        rows.append(Value(f"rows.{index}", (*cut.dims[:1], size, "vocab"), cut.dtype))
    tape.views(cut, tuple(rows))
    return _mean(tape, op, rows)


def _without_last(tape: Tape, logits: Value) -> Value:
    """[..., :-1, :] as rows: a copy where sequences lie side by side."""
    tokens = tape.context.size(logits.dims[1]) - 1
    cut = tape.view(logits, f"{logits.name}.cut", (BATCH, tokens, "vocab"), copies=True)
    if tape.context.size(BATCH) == 1 or not tokens:
        return cut
    made = Value(f"{logits.name}.shifted", cut.dims, cut.dtype)
    return tape.emit(made.name, (cut,), made, what="shifted logits", passes=(cut,))


def _mean(tape: Tape, op: Op, parts: list[Value]) -> Value:
    """Cross entropy of each, whose losses a token are joined and averaged."""
    losses = []
    for index, logits in enumerate(parts):
        scores = Value(f"log_softmax.{index}", logits.dims, logits.dtype)
        tape.emit(scores.name, (logits,), scores, what="log-softmax of the logits", saves=(scores,))
        one = Value(f"loss.{index}", logits.dims[:-1], "fp32")
        losses.append(tape.emit(one.name, (scores,), one, what="loss of each token", saves=(scores,)))
    output = tape.like(op.outputs[0], "fp32")
    made = tape.emit(op.name, losses, output, what="loss")
    whole = (value for name, value in tape.values.items() if name.startswith("logits.") and name.endswith(".fp32"))
    tape.hold(*parts, *whole)
    return made
