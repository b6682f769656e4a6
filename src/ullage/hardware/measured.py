"""What `ullage bench` measured of one machine, as frozen values: machine.py reads them, calibration looks seconds up in them."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from ullage.frozen import frozen, hash_once
from ullage.hardware.curve import Samples

Direction = Literal["forward", "dgrad", "wgrad", "batched"]
"""Of a matmul: a linear's product, its input's and its weight's gradient, and many small ones at once (attention's, eager)."""


@frozen
class Multiplied:
    """Rates of [m, k] x [k, n] at every combination of the axes, m slowest and k fastest. Each axis rises."""

    dtype: str
    direction: Direction
    m: tuple[float, ...]
    n: tuple[float, ...]
    k: tuple[float, ...]
    flops_per_s: tuple[float, ...]


@frozen
class Moved:
    """Seconds of one op that memory bounds, by the bytes that it reads and writes; both rise. The least of them is the op's start.

    dtype: of its tensors, which a CPU converts where it computes in fp32.
    """

    kind: str
    dtype: str
    backward: bool
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@frozen
class Attended:
    """Rates of fused attention by sequence length; FLOPs as calibration/attention.py counts them."""

    dtype: str
    head_dim: int
    causal: bool
    backward: bool
    seq: tuple[float, ...]
    flops_per_s: tuple[float, ...]


@frozen
class Measured:
    """A machine while ``processes`` of one job run on it, ``threads`` threads each.

    sharded_layer_s, split_layer_s: what FSDP2's, and tensor parallelism's, own Python takes of a layer in a step, beyond what it sends.
    overlap: the share of a collective that is hidden behind computing of the same length, 0 to 1. host_bytes_per_s: to the device and
    back, pinned; None where host and device are one. spread: how much longer the median repeat took than the least, the median of the table
    where that is most. file: where this was read from.
    """

    file: str
    date: str
    source: str
    processes: int
    threads: int
    spread: float
    overlap: float
    process_bytes: int
    matmuls: tuple[Multiplied, ...]
    traffic: tuple[Moved, ...]
    attention: tuple[Attended, ...]
    collectives: tuple[Samples, ...] = ()
    sharded_layer_s: float = 0.0
    split_layer_s: float = 0.0
    host_bytes_per_s: tuple[float, float] | None = None
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.file, self.date, self.processes, self.spread)
