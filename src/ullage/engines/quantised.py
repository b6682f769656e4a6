"""Weights as bitsandbytes keeps them (functional.py, quantize_4bit): two to a byte, with a scale for each 64 of them.

Double quantisation keeps the scales in 8 bits, with an fp32 scale for 256 of those. Each weight has its tables of levels for itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ullage.engines.base import sized
from ullage.kernels.transformers_quantised import BLOCK
from ullage.memory.program import Item
from ullage.memory.rank import LocalParam

FROZEN = "frozen parameters"
"""What a ledger calls the weights beside them."""
SCALES = 256
"""Scales that share a scale (functional.py, quantize_4bit)."""
LEVELS = 16
"""Values that four bits tell apart."""


def held(params: Iterable[LocalParam]) -> list[Item]:
    """What they are kept in: one Item for each kind of tensor, of one allocation a weight."""
    pieces: dict[tuple[str, str], list[int]] = {}
    for param in params:
        for what, numel, dtype in _tensors(param.numel, str(param.param.elements)):
            pieces.setdefault((what, dtype), []).extend([numel] * param.copies)
    return [
        sized("parameters", what, sum(numels), dtype, pieces=numels, why=f"{len(numels)} tensors")
        for (what, dtype), numels in pieces.items()
    ]


def _tensors(numel: int, base: str) -> list[tuple[str, int, str]]:
    """(what, elements, type) of one weight of ``numel`` elements."""
    scales = -(-numel // BLOCK)
    packed = [("4-bit weights", -(-numel // 2), "uint8"), ("4-bit levels", LEVELS, "fp32")]
    if base == "nf4":
        return [*packed, ("scales of 4-bit weights", scales, "fp32")]
    return [
        *packed,
        ("scales of 4-bit weights", scales, "uint8"),
        ("scales of scales", -(-scales // SCALES), "fp32"),
        ("mean scale", 1, "fp32"),
        ("8-bit levels", 256, "fp32"),
    ]
