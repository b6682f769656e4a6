"""What a kernel tells the replay: the steps that an op becomes, each with what it makes, keeps and needs.

A step is one autograd node as memory sees it. All sizes are bytes of this rank, after the layout has divided the dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ullage import dtypes
from ullage.frozen import FrozenMap, frozen, hash_once, replace
from ullage.job.bind import EXPERT_PARALLEL, EXPERT_TENSOR_PARALLEL
from ullage.model.graph import ROUTED, Dim, Tensor


class Buffer(NamedTuple):
    """A tensor that a step makes. ``what`` and ``formula`` are what the ledger prints. dtype: of its elements, "" where nobody says.
    A search makes a hundred thousand."""

    name: str
    bytes: int
    what: str = ""
    formula: str = ""
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class WeightGrad:
    """The gradient that a step's backward makes of one parameter, in the type in which autograd makes it.

    fusable: made by a matmul that can add into an accumulator instead (Megatron's gradient accumulation fusion).
    """

    param: str
    numel: int
    dtype: str
    fusable: bool = False


Slot = int | str
"""Which tensor beside the stream: one that a trace numbers, or a name."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor beside the stream, or its gradient, on its way from one block to another: a skip connection, an encoder's output.

    name: in this block. slot: the same at both ends, and of no other that is on its way meanwhile. what: for the ledger.
    grad: whether autograd asks for a tensor's gradient.
    """

    name: str
    slot: Slot
    bytes: int
    what: str = "tensor that skips blocks"
    grad: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """A gradient that a node makes in another shape or type than its read's: once the node has returned, the engine sums it to the
    read's shape (``total``, where the sum has another type than the read) and casts it (torch/csrc/autograd/engine.cpp,
    validate_outputs).
    """

    read: str
    made: Buffer
    total: Buffer | None = None


@frozen
class Step:
    """One autograd node.

    reads: tensors it takes, by name. writes: tensors it makes. aliases: (view, tensor) pairs that share a storage;
    a view that covers a part of it is a Buffer of its own size.
    saves: names among reads, writes and aliases that stay until this step's backward.
    scratch: live during the forward alone; backward_scratch: during the backward alone.
    fits: reads whose gradient is not made as the read is.
    passes: reads whose gradient *is* the gradient of the first output (residual adds, views, in-place kernels).
    offloads: saved names that move to the host after the forward and come back for this step's backward.
    reuses: reads (saved ones) over whose own storage their gradient is written.
    hands: (a read or a weight, a saved tensor that is its gradient): made in the forward, handed on in the backward.
    no_grad: reads that get no gradient. Every other read gets a new gradient of its own size.
    weights: parameters whose gradients the backward makes.
    holds: tensors that a frame of the layer code still names, so that they live to the end of this step.
    summed: reads and weights (a bias) whose gradient is the output's, summed to their shape by the engine when the node's function has
    returned (torch/csrc/autograd/engine.cpp, validate_outputs).
    view_grads: reads whose gradient is a view of another tensor (a matmul's result, reshaped): autograd never adds into those in
    place (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace: the storage has a second owner).
    wrapped: reads that are tensor subclasses (DTensor), whose gradients autograd never adds in place (the same function).
    caches: tensors that stay until the forward's context exits, recomputed or not (autocast's copies of weights).
    module: the recompute module that the step belongs to.
    op: what selective policies know the step by ("matmul", "attention", "all_to_all").
    borrows: tensors of blocks before that the block reads, here first. lends: of writes, those that later blocks read.
    sends: gradients that the backward makes for a block before. receives: gradients made by a later block, gone with this backward.
    sums: of what it borrows or lends, tensors for which all blocks that read them make gradients: the last of those makes one tensor of
    it, the others add to that, and the maker of the tensor uses it up.
    leaf: whether it makes a tensor that asks for a gradient and follows from nothing: autograd's accumulator keeps it and its gradient to
    the end of the backward, recomputed or not.
    serves: of what the backward needs (saved names, backward_scratch), for whose gradient alone: reads and weights. Where none of those
    asks for one, it is not there.
    moves: bytes through memory, forward and backward, of a step of several kernels that work in place, which its reads and writes do
    not tell.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[Buffer, ...] = ()
    aliases: tuple[tuple[str | Buffer, str], ...] = ()
    saves: tuple[str, ...] = ()
    scratch: tuple[Buffer, ...] = ()
    backward_scratch: tuple[Buffer, ...] = ()
    fits: tuple[Fit, ...] = ()
    passes: tuple[str, ...] = ()
    reuses: tuple[str, ...] = ()
    hands: tuple[tuple[str, str], ...] = ()
    offloads: tuple[str, ...] = ()
    no_grad: tuple[str, ...] = ()
    weights: tuple[WeightGrad, ...] = ()
    holds: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    view_grads: tuple[str, ...] = ()
    wrapped: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    module: str = ""
    op: str = ""
    borrows: tuple[Crossing, ...] = ()
    lends: tuple[Crossing, ...] = ()
    sends: tuple[Crossing, ...] = ()
    receives: tuple[Crossing, ...] = ()
    sums: tuple[Crossing, ...] = ()
    leaf: bool = False
    serves: tuple[tuple[str, tuple[str, ...]], ...] = ()
    moves: tuple[int, int] | None = None
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(self, self.name, self.reads, self.writes, self.saves, self.scratch, self.moves)

    @property
    def made(self) -> tuple[str, ...]:
        """Names that the step brings into being: what it writes and the views that it takes."""
        return (
            *(buffer.name for buffer in self.writes),
            *(view.name if isinstance(view, Buffer) else view for view, _ in self.aliases),
        )


def gradient_of(name: str) -> str:
    """What a block has in ``handed`` where it is the one that makes a gradient which several blocks add up."""
    return f"{name}.gradient"


@frozen
class Segment:
    """Steps [start, stop) that are recomputed.

    keep: names made inside that are kept all the same (selective policies by op).
    discards_output: what follows does not keep the segment's outputs either; they are recomputed when first needed.
    early_stop: the recomputation ends where the last step that saves anything saves its inputs (torch's non-reentrant default).
    reentrant: it runs inside an autograd node whose frame names its outputs and their gradients until its backward is through.
    """

    start: int
    stop: int
    keep: frozenset[str] = frozenset()
    discards_output: bool = False
    early_stop: bool = False
    reentrant: bool = False


@frozen
class Context:
    """All that a kernel may depend on beside its op; hashable, so that a replay can be cached on it.

    sizes: every dimension as this rank holds it. compute: the type that matmuls run in; params: of the stored weights.
    narrow: the type of fewer bits that the layers' matrices multiply in (kernels/narrow.py).
    residual: the type of the stream between blocks. version: of the stack, as the job names it.
    device: whose kernels run, "cuda" or "cpu" (what a trace without a GPU sees): devices.py.
    """

    sizes: FrozenMap
    stack: str
    version: str | None = None
    compute: str = "bf16"
    params: str = "bf16"
    residual: str = "bf16"
    autocast: bool = False
    narrow: str | None = None
    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: str = "ring"
    ep: int = 1
    etp: int = 1
    attention: str = "flash"
    loss: str = "full"
    loss_chunks: int | None = None
    compile: bool = False
    padding_mask: bool = False
    options: FrozenMap = FrozenMap()
    compute_capability: tuple[int, int] | None = None
    device: str = "cuda"
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return hash_once(
            self, self.sizes, self.stack, self.version, self.compute, self.params, self.attention, self.options
        )

    def size(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        value = self.sizes[dim]
        assert isinstance(value, int), dim
        return value

    def numel(self, dims: tuple[Dim, ...]) -> int:
        total = 1
        for dim in dims:
            total *= self.size(dim)
        return total

    def buffer(
        self, name: str, dims: tuple[Dim, ...], dtype: str | None = None, what: str = "", copies: int = 1
    ) -> Buffer:
        """A tensor of these dimensions (``copies`` of them), in the compute type unless another is given."""
        dtype = dtype or self.compute
        numel, factors = copies, []
        for dim in dims:
            size = self.size(dim)
            numel *= size
            factors.append(str(dim) if dim is size else f"{dim} {size}")
        if copies > 1:
            factors.append(str(copies))
        formula = f"{' x '.join(factors)} x {_each(dtype)}"
        return Buffer(name, dtypes.size_bytes(numel, dtype), what or name, formula, dtype)

    def tensor(self, tensor: Tensor, what: str = "") -> Buffer:
        """A tensor of the graph, in the type that the graph gives it or else the compute type."""
        return self.buffer(tensor.name, tensor.dims, tensor.elements, what)

    def weight(
        self, param: str, dims: tuple[Dim, ...], dtype: str | None = None, *, fusable: bool = False
    ) -> WeightGrad:
        return WeightGrad(param, self.numel(dims), dtype or self.compute, fusable)

    def option(self, name: str, default: object = None) -> object:
        """One of engine.options, or ``default``."""
        return self.options.get(name, default)


@lru_cache(maxsize=64)
def _each(dtype: str) -> str:
    return f"{dtypes.bits(dtype) / 8:g} B ({dtype})"


@lru_cache(maxsize=1024)
def without_experts(context: Context) -> Context:
    """What of a context matters to ops that are not experts': the same under any expert parallelism."""
    if not any(name in context.sizes for name in _EXPERTS_SIZES):
        return context
    sizes = {name: size for name, size in context.sizes.items() if name not in _EXPERTS_SIZES}
    return _one(replace(context, sizes=FrozenMap(sizes), ep=1, etp=1))


@lru_cache(maxsize=1024)
def without_loss(context: Context) -> Context:
    """What of a context matters to ops that do not know of the loss."""
    return _one(replace(context, loss="full", loss_chunks=None))


@lru_cache(maxsize=1024)
def _one(context: Context) -> Context:
    """Of equal ones the first: a cache that is keyed by it need not compare all of it again."""
    return context


_EXPERTS_SIZES = (*EXPERT_PARALLEL, *EXPERT_TENSOR_PARALLEL, ROUTED)
