"""Rotary embedding in transformers' models: apply_rotary_pos_emb on q and k, whole or on the first part of each head."""

from __future__ import annotations

from dataclasses import replace

from ullage.kernels.eager import Tape, Value, promote
from ullage.model.graph import SEQ, Dim, Op, Tensor

JOINS = frozenset(
    {
        "phi3",
        "phi",
        "gpt_neox",
        "stablelm",
        "persimmon",
        "glm",
        "glm4",
        "glm4_moe",
        "nemotron",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
    }
)
"""Models that cut heads into a turned and an unturned part and join them again, even where nothing is unturned."""
INTERLEAVES = frozenset({"ernie4_5", "glm", "glm4", "helium"})
"""Models whose every layer repeats cos and sin for the two elements of a pair."""
_WIDENS = frozenset({"cohere", "cohere2"})
"""Models that turn in fp32."""
_NARROWS = frozenset({"cohere", "cohere2", "ernie4_5", "olmo", "olmo2", "olmo3"})
"""Models that cast the result back into the type of q and k."""


_FP32_TABLES = frozenset({"ernie4_5", "olmo", "olmo2", "olmo3"})
"""Models whose cos and sin stay in fp32; the others' come in the residual stream's type."""


def table_dtype(tape: Tape) -> str:
    return "fp32" if tape.family in _FP32_TABLES else tape.context.residual


def rope(tape: Tape, op: Op) -> None:
    """q and k, which the calling frame names until both are done."""
    tape.module = "rope"
    if tape.family in INTERLEAVES:
        _interleave(tape, op)
    if tape.family in _SCALES_QUERIES:
        query, key = op.outputs
        _turn(tape, replace(op, outputs=(replace(query, name=f"{query.name}.unscaled"), key)))
        _scaled_by_position(tape, query)
    else:
        _turn(tape, op)


def _turn(tape: Tape, op: Op) -> None:
    """The rotary embedding alone."""
    sources = [tape[name] for name in op.inputs]
    raw = (
        sources if tape.family == "gpt_neox" else [tape.view(one, f"{one.name}.heads", copies=True) for one in sources]
    )
    if tape.family in JOINS:
        _joined(tape, op, raw)
    else:
        _whole(tape, op, raw)
    tape.hold(*raw)


_SCALES_QUERIES = frozenset({"ministral3"})
"""Models that multiply queries by a function of their position (models/ministral3/modeling_ministral3.py, get_llama_4_attn_scale)."""


def _scaled_by_position(tape: Tape, query: Tensor) -> None:
    """The factors, which each layer makes and saves, are one of a position."""
    source = tape[f"{query.name}.unscaled"]
    factors = Value(f"{query.name}.factors", (1, 1, SEQ, 1), source.dtype)
    tape.emit(factors.name, (), factors, what="factor of the queries of each position")
    tape.mul_constant(source, query.name, source.dtype, factors)


def _interleave(tape: Tape, op: Op) -> None:
    """cos and sin of every second element, twice each: this layer's own, saved by its products to the backward's end."""
    dims = (1, SEQ, _turning(tape, op, tape[op.inputs[0]]))
    for which in ("cos", "sin"):
        table = Value(f"rotary.{which}", dims, table_dtype(tape))
        tape.emit(table.name, (), table, what=f"{which} of each pair, the layer's own")


def _turning(tape: Tape, op: Op, source: Value) -> int:
    """Elements of a head that turn."""
    fraction = op.attrs["fraction"]
    assert isinstance(fraction, float | int), fraction
    return int(tape.context.size(source.dims[-1]) * fraction)


def _whole(tape: Tape, op: Op, raw: list[Value]) -> None:
    dtype = "fp32" if tape.family in _WIDENS else None
    wide = [tape.cast(one, dtype or one.dtype, f"{one.name}.fp32") for one in raw]
    made = []
    for source, output in zip(wide, op.outputs, strict=True):
        turned = _turned(tape, source, output)
        if tape.family in _NARROWS and turned.dtype != raw[0].dtype:
            turned = replace(turned, name=f"{output.name}.wide")
        made.append(rotate(tape, source, turned))
    for one, output in zip(made, op.outputs, strict=True):
        if one.name != output.name:
            tape.cast(one, raw[0].dtype, output.name)
    tape.hold(*wide, *made)


def _turned(tape: Tape, source: Value, output: Tensor) -> Value:
    """The result is promoted to the type of cos and sin."""
    return tape.like(output, promote(source.dtype, table_dtype(tape)))


def rotate(tape: Tape, source: Value, output: Value) -> Value:
    """x * cos + rotate_half(x) * sin."""
    name = output.name
    cos, sin = (tape.values.get(f"rotary.{which}") for which in ("cos", "sin"))
    half: tuple[Dim, ...] = (*source.rows, tape.context.size(source.dims[-1]) // 2)
    first = tape.mul_constant(source, f"{name}.cos", output.dtype, cos)
    left = tape.view(source, f"{name}.x1", half, copies=True)
    right = tape.view(source, f"{name}.x2", half, copies=True)
    negative = tape.emit(f"{name}.neg", (right,), Value(f"{name}.neg", half, source.dtype))
    turned = Value(f"{name}.rotated", source.dims, source.dtype)
    tape.emit(turned.name, (negative, left), turned, passes=(negative, left))
    second = tape.mul_constant(turned, f"{name}.sin", output.dtype, sin)
    return tape.add(first, second, output, f"{name[0]} after rotary embedding")


def _joined(tape: Tape, op: Op, raw: list[Value]) -> None:
    """The first part of each head turned, the rest as it was, joined into a new tensor."""
    parts = []
    for source, output in zip(raw, op.outputs, strict=True):
        size = tape.context.size(source.dims[-1])
        turning = _turning(tape, op, source)
        dims = (*source.rows, turning)
        turned = tape.view(source, f"{output.name}.rot", dims, copies=True) if turning < size else source
        rest = tape.view(source, f"{output.name}.pass", (*source.rows, size - turning), copies=True)
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
