"""What several of Megatron's kernels ask of a job, and the 8-bit copies of what its linears multiply."""

from __future__ import annotations

import re

from ullage.kernels.narrow import SCALE_BYTES, narrow_type, recipe
from ullage.kernels.step import Buffer, Context
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, Dim, Op


def before(version: str | None, release: tuple[int, int]) -> bool:
    """Whether a job's Megatron-Core is older than ``release``; the newest where it names none."""
    if version is None:
        return False
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < release


def is_local(context: Context) -> bool:
    return context.option("transformer_impl", "transformer_engine") == "local"


def gathers(context: Context) -> bool:
    """Whether tensor-parallel linears gather their input and scatter their output over the sequence."""
    return context.sp and context.tp > 1


def narrow_input(op: Op, name: str, context: Context) -> tuple[Buffer, ...]:
    """A TE linear keeps its input as the backward multiplies it, in one order, with its scales (pytorch/module/linear.py)."""
    narrow = narrow_type(op, context)
    if narrow is None or is_local(context):
        return ()
    dims: tuple[Dim, ...] = (ROUTED,) if op.kind == "grouped_linear" else (BATCH, SEQ_SP if gathers(context) else SEQ)
    inner = op.params[0].dims[-1:] if op.kind == "grouped_linear" else op.attrs["in"]
    assert isinstance(inner, tuple)
    if op.attrs.get("parallel") == "row":
        dims = (BATCH, SEQ)
    shape = (*dims, *inner)
    kept = context.buffer(f"{name}.{narrow}_input", shape, narrow, f"{narrow} input of {name}")
    scales = round(context.numel(shape) * SCALE_BYTES.get(recipe(context), 0))
    beside = Buffer(f"{name}.scales", scales, f"scales of the {narrow} input of {name}") if scales else None
    return (kept, beside) if beside else (kept,)
