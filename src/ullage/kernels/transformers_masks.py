"""Attention masks of transformers' models (masking_utils.py): the model's forward makes one for each kind of layer.

All layers of a kind read the same. It lives to the end of that forward, or as long as a checkpoint names it among a layer's inputs.
"""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Context, Crossing
from ullage.model.graph import BATCH, SEQ, Op


def is_eager(context: Context, op: Op) -> bool:
    """Whether attention runs as the layer code writes it; a cap on the scores leaves no other way."""
    return context.attention == "eager" or bool(op.attrs["softcap"])


def needs_mask(context: Context, window: object) -> bool:
    """Whether sdpa gets a mask: padding, or a window shorter than the sequence (sdpa_mask)."""
    return context.padding_mask or (isinstance(window, int) and window < context.size(SEQ))


def make(tape: Tape, op: Op) -> None:
    """The masks of a model, by the windows of its layers; op: the embedding."""
    windows = op.attrs.get("windows", ())
    assert isinstance(windows, tuple)
    for window in windows:
        mask = _mask(tape.context, op, window)
        if mask is not None:
            tape.emit(mask.name, (), mask, what="attention mask", lends=(_crossing(tape, mask, window),))


def borrowed(tape: Tape, op: Op) -> tuple[Value, tuple[Crossing, ...]] | None:
    """The mask of an attention, and whence it comes; None: it gets none."""
    mask = _mask(tape.context, op, op.attrs["window"])
    return None if mask is None else (tape.define(mask), (_crossing(tape, mask, op.attrs["window"]),))


def _mask(context: Context, op: Op, window: object) -> Value | None:
    """Eager attention adds one of the stream's type; sdpa's is of booleans, the same for every sequence where none is padded."""
    name = f"attention_mask.{window or 'full'}"
    if is_eager(context, op):
        bidirectional = not op.attrs["causal"] and not context.padding_mask
        return None if bidirectional else Value(name, (BATCH, 1, SEQ, SEQ), context.residual)
    if not needs_mask(context, window):
        return None
    return Value(name, (BATCH if context.padding_mask else 1, 1, SEQ, SEQ), "bool")


def _crossing(tape: Tape, mask: Value, window: object) -> Crossing:
    slot = window if isinstance(window, int) else 0
    return Crossing(mask.name, slot, tape.buffer(mask).bytes, "attention mask")
