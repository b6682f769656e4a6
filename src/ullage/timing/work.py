"""What one op of a block does on one rank: matrices multiplied, bytes moved through memory, bytes exchanged with other ranks."""

from __future__ import annotations

from dataclasses import field

from ullage.calibration.matmul import Scales
from ullage.calibration.memory import MemoryKind
from ullage.frozen import frozen, hash_once, replace
from ullage.hardware.curve import Kind
from ullage.hardware.measured import Direction


@frozen
class Matmul:
    """[m, k] x [k, n], ``groups`` of them (experts; m is then the rows of each), in one kernel or one each on ``streams`` streams.

    accumulate: into an fp32 buffer (Megatron's gradient accumulation fusion). aligned: rows of all three start at multiples of 16 bytes.
    scales: of 8-bit operands, one for each "tensor", each "row" (torch._scaled_mm's own kernel, CUTLASS) or each "block" of 32. cuda: whose
    cuBLAS; "" a recent one.
    direction: which of a linear's three it is.
    """

    m: int
    n: int
    k: int
    dtype: str
    groups: int = 1
    accumulate: bool = False
    streams: int = 0
    aligned: bool = True
    scales: Scales = "tensor"
    cuda: str = ""
    direction: Direction = "forward"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.groups

    def transposes(self, *, accumulate: bool) -> tuple[Matmul, Matmul]:
        """The two of the backward: the input's gradient [m, n] x [n, k], and the weight's [n, m] x [m, k]."""
        return (
            replace(self, n=self.k, k=self.n, direction="dgrad"),
            replace(self, m=self.n, n=self.k, k=self.m, accumulate=accumulate, direction="wgrad"),
        )


@frozen
class Attention:
    """Core attention of one rank, in kernels that never write the scores. queries, keys: of one sequence, as this rank sees them. parts: in
    how many the keys come, a kernel for each (a ring)."""

    batch: int
    heads: int
    head_dim: int
    v_head_dim: int
    queries: int
    keys: int
    causal: bool
    dtype: str
    parts: int = 1

    @property
    def flops(self) -> int:
        """Forward: scores and their product with v; a causal kernel skips the half that is masked."""
        whole = 2 * self.batch * self.heads * self.queries * self.keys * (self.head_dim + self.v_head_dim)
        return whole // 2 if self.causal else whole


@frozen
class Traffic:
    """Bytes that one kernel reads and writes; none: a view. kind: what calibration knows it by. dtype: of most of those bytes: a
    CPU converts 16-bit numbers to compute with them. kernels: more than one where ops of torch's own follow each other."""

    bytes: int
    kind: MemoryKind = "pointwise"
    dtype: str = "fp32"
    kernels: int = 1


@frozen
class Exchange:
    """A collective of ``payload_bytes`` over an axis of the layout, payload as comm/volume.py counts it.

    behind: the matmul of the same op ("forward", "dgrad", "wgrad"), or the attention, that runs while it is on the wire; "" where the
    rank waits. pieces: it is cut into as many, each of which a part of that matmul waits for or makes. copies: experts of a token, which
    is sent once to each rank, and domain, that has any of them.
    """

    kind: Kind
    axis: str
    payload_bytes: int
    behind: str = ""
    pieces: int = 1
    copies: int = 1


@frozen
class Pass:
    """One direction of one op. matmuls of a backward: the input's gradient, then the weight's, of each in turn."""

    matmuls: tuple[Matmul, ...] = ()
    attention: Attention | None = None
    traffic: tuple[Traffic, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.matmuls, self.attention, self.traffic, self.exchanges)


@frozen
class OpWork:
    """An op, or a group of neighbours that the stack fuses into one kernel. module: by which recompute knows it."""

    name: str
    module: str
    forward: Pass
    backward: Pass
