"""What is measured, thoroughly or quickly."""

from __future__ import annotations

from ullage.frozen import frozen


@frozen
class Extent:
    """Axes and sizes of what is measured, all powers of two. seconds: after which no round begins."""

    rounds: int
    seconds: float
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    batched: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    optimizer_numel: tuple[int, ...]
    head_dims: tuple[int, ...]
    seq: tuple[int, ...]
    payload_bytes: tuple[int, ...]


def _powers(*exponents: int) -> tuple[int, ...]:
    return tuple(2**one for one in exponents)


_CPU = Extent(
    rounds=6,
    seconds=20.0,
    m=_powers(7, 9, 11),
    n=_powers(7, 9, 11, 13),
    k=_powers(7, 9, 11),
    batched=_powers(6, 8, 10),
    moved_bytes=_powers(14, 18, 20, 22, 24, 26),
    optimizer_numel=_powers(18, 22, 24),
    head_dims=_powers(5, 6, 7),
    seq=_powers(7, 9, 10),
    payload_bytes=_powers(12, 16, 18, 20, 22, 24, 26),
)
_CPU_QUICK = Extent(
    rounds=3,
    seconds=5.0,
    m=_powers(7, 10),
    n=_powers(7, 10),
    k=_powers(7, 10),
    batched=_powers(6, 9),
    moved_bytes=_powers(14, 20, 22, 25),
    optimizer_numel=_powers(18, 22),
    head_dims=_powers(6),
    seq=_powers(7, 9),
    payload_bytes=_powers(12, 18, 22, 25),
)
_GPU = Extent(
    rounds=8,
    seconds=20.0,
    m=_powers(7, 10, 12, 14),
    n=_powers(8, 10, 12, 14),
    k=_powers(8, 10, 12, 14),
    batched=_powers(6, 9, 11),
    moved_bytes=_powers(14, 20, 24, 26, 28, 30),
    optimizer_numel=_powers(20, 24, 27),
    head_dims=_powers(6, 7),
    seq=_powers(9, 11, 13),
    payload_bytes=_powers(12, 16, 20, 22, 24, 26, 28),
)
_GPU_QUICK = Extent(
    rounds=3,
    seconds=5.0,
    m=_powers(9, 12),
    n=_powers(9, 12),
    k=_powers(9, 12),
    batched=_powers(6, 10),
    moved_bytes=_powers(14, 22, 26, 28),
    optimizer_numel=_powers(20, 26),
    head_dims=_powers(6, 7),
    seq=_powers(9, 11),
    payload_bytes=_powers(12, 20, 24, 27),
)


def extent(device: str, *, quick: bool) -> Extent:
    """device: cpu or cuda."""
    if device == "cuda":
        return _GPU_QUICK if quick else _GPU
    return _CPU_QUICK if quick else _CPU
