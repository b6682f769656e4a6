"""Matrices multiplied in fewer bits than the tensors around them: of which ops, and in how many orders an operand is kept."""

from __future__ import annotations

from ullage.kernels.step import Context
from ullage.model.graph import Op

MATRICES = ("linear", "grouped_linear")
HEAD = "lm_head"


def narrow_type(op: Op, context: Context) -> str | None:
    """fp8; None where an op multiplies in the compute type: the head, a router."""
    if op.kind not in MATRICES or op.name.endswith(HEAD):
        return None
    return context.narrow


def recipe(context: Context) -> str:
    """How operands are scaled: "delayed", "tensorwise", "rowwise", "blockwise" or "mxfp8"."""
    if context.stack == "megatron":
        return str(context.option("fp8_recipe") or DEFAULT)
    return str(context.option("float8_recipe") or "tensorwise")


DEFAULT = "delayed"
"""Megatron's --fp8-recipe (training/arguments.py)."""

PER_TENSOR = ("delayed", "tensorwise")
"""Recipes whose matmuls take one scale for a whole tensor."""


def orders(recipe: str, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """In which Transformer Engine keeps an operand that a backward multiplies again.

    Blackwell of data centers multiplies 8-bit matrices with one scale in any layout (pytorch/utils.py, is_non_tn_fp8_gemm_supported),
    so that nothing is transposed ahead (csrc/quantizer.cpp).
    """
    any_layout = capability is not None and ((10, 0) <= capability < (12, 0) or capability >= (13, 0))
    return ("rows",) if any_layout and recipe in PER_TENSOR else ("rows", "columns")
