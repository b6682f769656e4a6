"""Rotary embedding in transformers' models: apply_rotary_pos_emb on q and k, whole or on the first part of each head."""

from __future__ import annotations

from ullage.kernels.eager import Tape, Value, promote
from ullage.model.graph import Dim, Op, Tensor

JOINS = frozenset({"phi3", "phi", "gpt_neox", "stablelm", "persimmon", "glm", "glm4", "glm4_moe"})
"""Models that cut heads into a turned and an unturned part and join them again, even where nothing is unturned."""


def rope(tape: Tape, op: Op) -> None:
    """q and k, which the calling frame names until both are done."""
    tape.module = "rope"
    sources = [tape[name] for name in op.inputs]
    raw = (
        sources if tape.family == "gpt_neox" else [tape.view(one, f"{one.name}.heads", copies=True) for one in sources]
    )
    if tape.family in JOINS:
        _joined(tape, op, raw)
    else:
        for source, output in zip(raw, op.outputs, strict=True):
            rotate(tape, source, _turned(tape, source, output))
    tape.hold(*raw)


def _turned(tape: Tape, source: Value, output: Tensor) -> Value:
    """cos and sin come in the residual stream's type, and the result is promoted to it."""
    return tape.like(output, promote(source.dtype, tape.context.residual))


def rotate(tape: Tape, source: Value, output: Value) -> Value:
    """x * cos + rotate_half(x) * sin."""
    name = output.name
    half: tuple[Dim, ...] = (*source.rows, tape.context.size(source.dims[-1]) // 2)
    first = tape.mul_constant(source, f"{name}.cos", output.dtype)
    left = tape.view(source, f"{name}.x1", half, copies=True)
    right = tape.view(source, f"{name}.x2", half, copies=True)
    negative = tape.emit(f"{name}.neg", (right,), Value(f"{name}.neg", half, source.dtype))
    turned = Value(f"{name}.rotated", source.dims, source.dtype)
    tape.emit(turned.name, (negative, left), turned, passes=(negative, left))
    second = tape.mul_constant(turned, f"{name}.sin", output.dtype)
    return tape.add(first, second, output, f"{name[0]} after rotary embedding")


def _joined(tape: Tape, op: Op, raw: list[Value]) -> None:
    """The first part of each head turned, the rest as it was, joined into a new tensor."""
    fraction = op.attrs["fraction"]
    assert isinstance(fraction, float | int), fraction
    parts = []
    for source in raw:
        size = tape.context.size(source.dims[-1])
        turning = int(size * fraction)
        dims = (*source.rows, turning)
        turned = tape.view(source, f"{source.name}.rot", dims, copies=True) if turning < size else source
        rest = tape.view(source, f"{source.name}.pass", (*source.rows, size - turning), copies=True)
        parts.append((turned, rest))
    if tape.family != "phi3":  # all are turned before the first is joined
        embedded = [
            rotate(tape, turned, Value(f"{output.name}.turned", turned.dims, _turned(tape, turned, output).dtype))
            for (turned, _), output in zip(parts, op.outputs, strict=True)
        ]
        for part, (_, rest), output in zip(embedded, parts, op.outputs, strict=True):
            _join(tape, part, rest, output)
        return
    for (turned, rest), output in zip(parts, op.outputs, strict=True):
        made = Value(f"{output.name}.turned", turned.dims, _turned(tape, turned, output).dtype)
        _join(tape, rotate(tape, turned, made), rest, output)


def _join(tape: Tape, turned: Value, rest: Value, output: Tensor) -> None:
    wide = tape.cast(rest, turned.dtype, f"{rest.name}.cast")
    made = tape.like(output, turned.dtype)
    tape.emit(made.name, (turned, wide), made, what=f"{made.name[0]} after rotary embedding", passes=(turned, wide))
