"""Element types by name, with their width."""

from __future__ import annotations

from ullage.errors import UnknownName, nearest

BITS: dict[str, int] = {
    "fp64": 64,
    "int64": 64,
    "fp32": 32,
    "int32": 32,
    "bf16": 16,
    "fp16": 16,
    "fp8": 8,
    "int8": 8,
    "uint8": 8,
    "bool": 8,
    "fp4": 4,
    "nf4": 4,
}


def bits(dtype: str) -> int:
    """Bits of one element of ``dtype``; UnknownName if there is no such type."""
    try:
        return BITS[dtype]
    except KeyError:
        raise UnknownName(
            "is no element type", key="dtype", value=dtype, allowed=", ".join(BITS), remedy=_hint(dtype)
        ) from None


def size_bytes(numel: int, dtype: str) -> int:
    """Bytes of ``numel`` elements of ``dtype``, rounded up to whole bytes."""
    return (numel * bits(dtype) + 7) // 8


def _hint(dtype: str) -> str | None:
    match = nearest(dtype, BITS)
    return f"did you mean {match}?" if match else None
