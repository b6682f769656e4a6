"""What every engine answers: an Account of one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_

from ullage import dtypes
from ullage.frozen import frozen, replace
from ullage.hardware.overheads import Overhead
from ullage.job.adapted import PACKED, adapters_type, model_type
from ullage.job.bind import local_sizes
from ullage.job.job import Job, Optimizer
from ullage.kernels import stacks, unsloth_loss
from ullage.kernels.narrow import narrow_compute
from ullage.kernels.step import Context
from ullage.memory.program import Item, Node, Sequence, alloc, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import BATCH, IMAGES, Graph, Param


@frozen
class Account:
    """Memory of one pipeline rank.

    static: what is allocated from the second step on, before the step begins. step: one whole optimizer step, from the first
    forward to zero_grad; it leaves nothing behind. groups: process groups that
    communicate on this rank: name, ranks, nodes crossed.
    late: what of ``static`` the first optimizer step makes (moments), so that the first forward runs without it.
    first: what runs once before the ``late`` states exist (the capture of CUDA graphs).
    before: the job as its first steps run it, after which the allocator gives back what it does not use (without CUDA graphs yet).
    load: how the rest of ``static`` comes about, where loading passes through copies; None: allocated one after another.
    host_bytes: host memory of this rank's process (offloaded states). host_at_load_bytes: of these, the shards that loading makes of
    weights which are whole beside them.
    eager: run on software from before CUDA 11.7 and NCCL 2.22, which loads and connects everything at the start.
    """

    static: tuple[tuple[Item, int], ...]
    step: Node
    late: tuple[Item, ...] = ()
    load: Node | None = None
    first: Node | None = None
    before: Job | None = None
    host_bytes: int = 0
    host_at_load_bytes: int = 0
    eager: bool = False
    groups: tuple[tuple[str, int, int], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def program(self) -> Node:
        """Static allocations, then the step: its peak is the rank's."""
        if self.first is None:
            return Sequence([Sequence([alloc(item, count) for item, count in self.static], "load"), self.step])
        return Sequence([Sequence([self._early], "load"), self.first, self._made_late, self.step])

    @property
    def _early(self) -> Node:
        late = set(self.late)
        return Sequence([alloc(item, count) for item, count in self.static if item not in late])

    @property
    def _made_late(self) -> Node:
        late = set(self.late)
        return Sequence([alloc(item, count) for item, count in self.static if item in late and item.bytes])

    @property
    def loading(self) -> Node:
        """What is allocated before the first step, as it comes about."""
        return self.load or self._early

    @property
    def history(self) -> Node:
        """A run as the allocator sees it: load, the first step without the late states, then a steady step."""
        return self.history_with(())

    def history_with(self, shorter: Sequence_[Node]) -> Node:
        """A run that takes shorter steps first, after which its longest one finds other blocks than it would by itself."""
        once = [] if self.first is None else [self.first]
        opening, others = shorter[:1] or (self.step,), shorter[1:]
        return Sequence([self.loading, *once, *opening, self._made_late, *others, self.step])

    @property
    def static_bytes(self) -> int:
        return sum(item.bytes * count for item, count in self.static)


Accounting = Callable[[Job, Graph, Rank], Account]


def context_of(job: Job, graph: Graph) -> Context:
    """The kernels' view of a job."""
    precision = job.precision
    layout = job.layout
    params = model_type(job)
    compute = precision.compute
    if compute in (
        "fp8",
        "fp4",
    ):  # of all that is not multiplied: Megatron's modules run in the type that they are held in
        compute = params if job.engine.name == "megatron" else "bf16"
    return Context(
        sizes=local_sizes(graph, layout, job.data, _capacity(job)),
        stack=job.stack,
        version=job.stack_version,
        compute=compute,
        params=params,
        residual=_residual(graph, params) if precision.autocast else compute,
        autocast=precision.autocast,
        narrow=narrow_compute(precision.compute, job.engine.options),
        tp=layout.tp,
        sp=layout.sp,
        cp=layout.cp,
        cp_kind=layout.cp_kind,
        ep=layout.ep,
        etp=layout.etp,
        attention=job.attention,
        loss=job.loss.kind,
        loss_chunks=_loss_chunks(job, graph, params),
        compile=job.compile,
        padding_mask=job.data.padding_mask,
        options=job.engine.options,
        compute_capability=job.cluster.device.compute_capability,
    )


def _capacity(job: Job) -> float | None:
    """Megatron-Core's factor where rows are filled up to it; where they are only cut off there, balanced routing stays below it
    (core/transformer/moe/moe_utils.py, get_capacity)."""
    factor = job.engine.options.get("moe_expert_capacity_factor")
    padded = job.engine.options.get("moe_pad_expert_input_to_capacity")
    return float(factor) if padded and isinstance(factor, int | float) else None


def _loss_chunks(job: Job, graph: Graph, params: str) -> int | None:
    """The job's own, or how many Unsloth's loss makes of what the weights leave free."""
    if job.loss.chunks is not None or job.stack != "unsloth" or job.loss.kind != "fused-linear":
        return job.loss.chunks
    weights = sum(
        run.repeat * dtypes.size_bytes(graph.numel(param), _width(param, params))
        for run in graph.runs
        for param in run.block.params
    )
    tokens = job.data.seq_len * job.data.micro_batch
    return unsloth_loss.chunks(tokens, graph.size("vocab"), max(0, job.cluster.device.capacity_bytes - weights))


def _width(param: Param, params: str) -> str:
    if param.elements in PACKED:
        return "nf4"
    return "int8" if param.elements == "int8" else params


def _residual(graph: Graph, params: str) -> str:
    """The stream's type under autocast: the embedding's, or fp32 where a layer norm follows it, which autocast runs so (bloom)."""
    ops = [op for run in graph.runs if run.block.role == "embedding" for op in run.block.ops]
    return "fp32" if any(op.attrs.get("norm") == "layernorm" for op in ops) else params


def optimizer_of(job: Job) -> Optimizer:
    """The job's optimizer; of adapters its states have their type, as torch makes states like what it steps."""
    optimizer = job.optimizer
    return (
        replace(optimizer, state=adapters_type(job))
        if job.lora is not None and optimizer.state != "8bit"
        else optimizer
    )


def sized(
    category: str,
    what: str,
    numel: int,
    dtype: str,
    *,
    shards: int = 1,
    why: str = "",
    lives: str = "the whole run",
    provenance: str = "exact",
    stream: int = 0,
    pieces: Sequence_[int] = (),
) -> Item:
    """An Item of ``numel`` elements over ``shards`` ranks, with the formula written out.

    pieces: elements of each tensor that the ``numel / shards`` elements are kept in, where that is more than one.
    """
    share = -(-numel // shards)
    formula = f"{numel} elements{f' / {shards}' if shards > 1 else ''} x {dtypes.bits(dtype) / 8:g} B ({dtype})"
    each = {piece: round_up(dtypes.size_bytes(piece, dtype)) for piece in set(pieces)}
    tensors = tuple(each[piece] for piece in pieces)
    return Item(
        category=category,
        what=what,
        bytes=sum(tensors) if tensors else round_up(dtypes.size_bytes(share, dtype)),
        pieces=tensors,
        formula=f"{formula}; {why}" if why else formula,
        lives=lives,
        provenance=provenance,
        stream=stream,
    )


def registered(context: Context) -> list[Item]:
    """The buffers that the model registers, each an allocation of its own."""
    return [
        Item(category="buffers", what=one.what, bytes=round_up(one.bytes), formula=one.formula, lives="the whole run")
        for one in stacks.buffers(context)
    ]


def images(context: Context) -> Item | None:
    """A micro-batch of images and their labels; None where a model reads tokens."""
    if "patches" not in context.sizes:
        return None
    pixels = context.buffer("pixel_values", IMAGES, "fp32")
    pieces = (round_up(pixels.bytes), round_up(dtypes.size_bytes(context.size(BATCH), "int64")))
    return Item(
        category="input",
        what="images and labels",
        bytes=sum(pieces),
        pieces=pieces,
        formula=f"{pixels.formula}; a label for each",
        lives="one micro-batch",
    )


def workspace(found: Overhead) -> Item:
    """A library's workspace, which torch's allocator holds for it."""
    return Item(
        category="workspace",
        what=found.what,
        bytes=round_up(found.bytes),
        formula=found.source,
        provenance=found.provenance,
        lives="from the first matmul on",
    )


def cublas_workspaces(found: Overhead) -> list[Item]:
    """cuBLAS' workspaces: torch keeps one for each thread's handle, and the forward's thread and autograd's have one each.

    Source: aten/src/ATen/cuda/CUDABlas.cpp, getCurrentCUDABlasHandle; both are in Liger's measured MLPs (tests/published/test_op_level.py).
    """
    return [
        workspace(replace(found, what=f"{found.what} of the {thread}")) for thread in ("main thread", "autograd thread")
    ]


def flag(options: Mapping[str, object], name: str, default: bool) -> bool:
    value = options.get(name, default)
    return bool(value)


def shard(tensors: Sequence_[int], shards: int) -> tuple[int, ...]:
    """Elements of each piece that one of ``shards`` ranks holds, when ``tensors`` are laid end to end and cut evenly.

    The rank in the middle stands for all: their totals are equal, the pieces nearly.
    """
    if shards == 1:
        return tuple(tensors)
    each = -(-sum(tensors) // shards)
    start = each * (shards // 2)
    pieces, at = [], 0
    for numel in tensors:
        overlap = min(start + each, at + numel) - max(start, at)
        if overlap > 0:
            pieces.append(overlap)
        at += numel
    rest = each - sum(pieces)
    return (*pieces, rest) if rest else tuple(pieces)


def pinned(n_bytes: int) -> int:
    """A page-locked block on the host: torch rounds it up to a power of two (ATen/core/CachingHostAllocator.h)."""
    return 1 << max(0, n_bytes - 1).bit_length()
