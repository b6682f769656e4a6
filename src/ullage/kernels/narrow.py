"""Matrices multiplied in fewer bits than the tensors around them: of which ops, and in how many orders an operand is kept."""

from __future__ import annotations

from collections.abc import Mapping

from ullage.dtypes import size_bytes
from ullage.job.wide import MATRICES, WIDE
from ullage.kernels.step import Context
from ullage.model.graph import Op

HEAD = "lm_head"


def narrow_type(op: Op, context: Context) -> str | None:
    """fp8 or fp4; None where an op multiplies in the compute type: the head, a router, what a job leaves so."""
    return None if stays_wide(op) else context.narrow


def stays_wide(op: Op) -> bool:
    return op.kind not in MATRICES or op.name.endswith(HEAD) or bool(op.attrs.get(WIDE))


def recipe(context: Context) -> str:
    """How operands are scaled: "delayed", "tensorwise", "rowwise", "blockwise", "mxfp8" or "nvfp4"."""
    if context.narrow == "fp4":
        return "nvfp4"
    if context.stack == "megatron":
        return str(context.option("fp8_recipe") or DEFAULT)
    return str(context.option("float8_recipe") or "tensorwise")


def narrow_compute(compute: str, options: Mapping[str, object]) -> str | None:
    """The type of fewer than 16 bits that a job's matrices multiply in. torchtitan's NVFP4Linear is a converter like Float8Linear."""
    if compute not in ("fp8", "fp4"):
        return None
    return "fp4" if options.get("float8_recipe") == "nvfp4" else compute


SCALE_BYTES = {"mxfp8": 1 / 32, "nvfp4": 1 / 16}
"""Of one element: a byte for 32 elements (OCP MX), for 16 (arXiv 2509.25149, section 2). Scales of other recipes do not count."""


def operand_bytes(numel: int, dtype: str, recipe: str) -> int:
    """Of an operand as it is multiplied, in one order, with its scales."""
    return size_bytes(numel, dtype) + round(numel * SCALE_BYTES.get(recipe, 0))


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
