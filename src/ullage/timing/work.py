"""What the ops of a block do on one rank: matrices multiplied, bytes moved through memory, bytes exchanged with other ranks.

Matmuls and attention follow from the ops' bound dimensions, as FLOPs; everything else is a kernel that memory bandwidth bounds, and
its bytes follow from the steps that the stack lowers the ops to: what a kernel fuses, it does not move.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from ullage import dtypes
from ullage.calibration.memory import MemoryKind
from ullage.frozen import frozen
from ullage.hardware.curve import Kind
from ullage.kernels import stacks
from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, STREAM, Block, Op, Tensor

LINEAR = ("linear", "router", "shared_gate")


@frozen
class Matmul:
    """[m, k] x [k, n], ``groups`` of them in one kernel (experts; m is then the rows of each).

    accumulate: into an fp32 buffer (Megatron's gradient accumulation fusion).
    """

    m: int
    n: int
    k: int
    dtype: str
    groups: int = 1
    accumulate: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.groups

    def transposes(self, *, accumulate: bool) -> tuple[Matmul, Matmul]:
        """The two of the backward: the input's gradient [m, n] x [n, k], and the weight's [n, m] x [m, k]."""
        return (
            Matmul(m=self.m, n=self.k, k=self.n, dtype=self.dtype, groups=self.groups),
            Matmul(m=self.n, n=self.k, k=self.m, dtype=self.dtype, groups=self.groups, accumulate=accumulate),
        )


@frozen
class Attention:
    """Core attention of one rank, in one kernel that never writes the scores. queries, keys: of one sequence, as this rank sees them."""

    batch: int
    heads: int
    head_dim: int
    v_head_dim: int
    queries: int
    keys: int
    causal: bool
    dtype: str

    @property
    def flops(self) -> int:
        """Forward: scores and their product with v; a causal kernel skips the half that is masked."""
        whole = 2 * self.batch * self.heads * self.queries * self.keys * (self.head_dim + self.v_head_dim)
        return whole // 2 if self.causal else whole


@frozen
class Traffic:
    """Bytes that one kernel reads and writes; kind: what calibration knows it by."""

    bytes: int
    kind: MemoryKind = "pointwise"


@frozen
class Exchange:
    """A collective of ``payload_bytes`` over an axis of the layout, payload as comm/volume.py counts it.

    behind: the matmul of the same op ("dgrad", "wgrad") that runs while it is on the wire; "" where the rank waits.
    """

    kind: Kind
    axis: str
    payload_bytes: int
    behind: str = ""


@frozen
class Pass:
    """One direction of one op. matmuls of a backward: the input's gradient, then the weight's, of each in turn."""

    matmuls: tuple[Matmul, ...] = ()
    attention: Attention | None = None
    traffic: tuple[Traffic, ...] = ()
    exchanges: tuple[Exchange, ...] = ()


@frozen
class OpWork:
    """An op, or a group of neighbours that the stack fuses into one kernel. module: by which recompute knows it."""

    name: str
    module: str
    forward: Pass
    backward: Pass


@lru_cache(maxsize=1024)
def block_work(block: Block, context: Context) -> tuple[OpWork, ...]:
    """Everything that a block does for one micro-batch, in order."""
    steps = stacks.lower(block, context)
    sizes = _sizes(block, steps, context)
    fused = _fuses(context)
    found = []
    named = set()
    for ops in _grouped(block.ops, fused):
        work = _op_work(ops, context)
        if work is not None:
            found.append(work)
        if ops[0].kind in (*LINEAR, "grouped_linear", "attention"):
            named.update({op.name for op in ops} | {str(ops[0].attrs.get("group"))})
    found += [_kernel(step, sizes, context) for step in _pointwise(steps, frozenset(named), context)]
    found += _views(steps, sizes)
    found += _accumulations(steps, sizes)
    return tuple(found)


def _fuses(context: Context) -> bool:
    """Whether neighbouring projections of one input are one matmul."""
    return context.stack == "megatron"


def _grouped(ops: tuple[Op, ...], fused: bool) -> Iterator[tuple[Op, ...]]:
    def key(op: Op) -> object:
        group = op.attrs.get("group")
        return group if group and (fused or op.attrs.get("fused")) else op.name

    for _, found in groupby(ops, key):
        yield tuple(found)


# -- matmuls


def _accumulates(context: Context) -> bool:
    return context.stack == "megatron" and bool(context.option("gradient_accumulation_fusion", True))


def _op_work(ops: tuple[Op, ...], context: Context) -> OpWork | None:
    op = ops[0]
    if op.kind in LINEAR:
        return _linear(ops, context)
    if op.kind == "grouped_linear":
        return _experts(ops, context)
    if op.kind == "attention":
        return _attention(op, context)
    if op.kind in ("dispatch", "combine") and context.ep > 1:
        rows = context.tensor(Tensor(name="rows", dims=(ROUTED, "hidden"))).bytes
        sent = Pass(exchanges=(Exchange(kind="all_to_all", axis="ep", payload_bytes=rows),))
        return OpWork(name=f"{op.name} exchange", module=op.module, forward=sent, backward=sent)
    if op.kind == "embedding" and context.tp > 1:
        return _vocabulary_parallel(op, context)
    if op.kind == "loss" and context.tp > 1:
        return _split_loss(op, context)
    return None


def _dtype(op: Op, context: Context) -> str:
    """Of a matmul: fp8 in the layers alone, the router in fp32."""
    if op.kind == "router":
        return "fp32" if context.stack == "megatron" else context.compute
    eight_bit = context.fp8 and op.kind in ("linear", "grouped_linear") and not op.name.endswith("lm_head")
    return "fp8" if eight_bit else context.compute


def _linear(ops: tuple[Op, ...], context: Context) -> OpWork:
    op = ops[0]
    dims = [param.dims for op in ops for param in op.params if len(param.dims) > 1] or [("vocab", "hidden")]
    inner = op.attrs.get("in", (dims[0][-1],))
    assert isinstance(inner, tuple)
    k = context.numel(inner)
    n = sum(context.numel(shape) for shape in dims) // k
    rows = context.numel((BATCH, SEQ if op.attrs.get("parallel") in ("column", "row") else SEQ_SP))
    if SEQ not in op.outputs[0].dims and SEQ_SP not in op.outputs[0].dims:
        rows = context.numel((BATCH,))  # a head of the first token alone
    forward = Matmul(m=rows, n=n, k=k, dtype=_dtype(op, context))
    here, back = _tensor_parallel(op, k if op.attrs.get("parallel") == "column" else n, rows, context)
    return OpWork(
        name=op.name if len(ops) == 1 else str(op.attrs["group"]),
        module=op.module,
        forward=Pass(matmuls=(forward,), exchanges=here),
        backward=Pass(matmuls=forward.transposes(accumulate=_accumulates(context)), exchanges=back),
    )


def _tensor_parallel(
    op: Op, width: int, rows: int, context: Context
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What a column- or row-parallel linear sends (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

    width: features of the tensor that is whole on every rank. Gathered inputs and scattered input gradients of a column-parallel
    backward run beside its own matmuls (Megatron-Core tensor_parallel/layers.py, asynchronous handles).
    """
    parallel = op.attrs.get("parallel")
    if context.tp == 1 or parallel not in ("column", "row"):
        return (), ()
    whole = dtypes.size_bytes(rows * width, context.compute)

    def exchange(kind: Kind, behind: str = "") -> Exchange:
        return Exchange(kind=kind, axis="tp", payload_bytes=whole, behind=behind)

    overlapped = context.stack == "megatron"
    if parallel == "column":
        if context.sp:
            gather = exchange("all_gather", "dgrad" if overlapped else "")
            scatter = exchange("reduce_scatter", "wgrad" if overlapped else "")
            return (exchange("all_gather"),), (gather, scatter)
        return (), (exchange("all_reduce", "wgrad" if overlapped else ""),)
    if context.sp:
        return (exchange("reduce_scatter"),), (exchange("all_gather"),)
    return (exchange("all_reduce"),), ()


def _experts(ops: tuple[Op, ...], context: Context) -> OpWork:
    """Every local expert's rows, at balanced routing: what all ranks of the group send here is what this rank sends."""
    weight = next(param for param in ops[0].params if len(param.dims) > 2)
    experts, _, k = (context.size(dim) for dim in weight.dims)
    n = sum(context.size(param.dims[1]) for op in ops for param in op.params if len(param.dims) > 2)
    rows = max(1, context.size(ROUTED) // experts)
    forward = Matmul(m=rows, n=n, k=k, dtype=_dtype(ops[0], context), groups=experts)
    return OpWork(
        name=ops[0].name,
        module=ops[0].module,
        forward=Pass(matmuls=(forward,)),
        backward=Pass(matmuls=forward.transposes(accumulate=_accumulates(context))),
    )


# -- attention


def _attention(op: Op, context: Context) -> OpWork:
    queries = context.size(SEQ)
    window = op.attrs.get("window")
    whole = queries * context.cp
    keys = min(whole, window) if isinstance(window, int) else whole
    sent, back = _context_parallel(context)
    if context.attention in ("eager", "math"):
        both = _unfused(queries, whole, context)
        gradients = tuple(one for matmul in both for one in matmul.transposes(accumulate=False))
        forward, backward = Pass(matmuls=both, exchanges=sent), Pass(matmuls=gradients, exchanges=back)
    else:
        core = Attention(
            batch=context.size(BATCH),
            heads=context.size("heads"),
            head_dim=context.size("head_dim"),
            v_head_dim=context.size("v_head_dim"),
            queries=queries,
            keys=keys,
            causal=bool(op.attrs.get("causal")) and keys == whole,
            dtype=context.compute,
        )
        forward, backward = Pass(attention=core, exchanges=sent), Pass(attention=core, exchanges=back)
    return OpWork(name=op.name, module=op.module, forward=forward, backward=backward)


def _unfused(queries: int, keys: int, context: Context) -> tuple[Matmul, Matmul]:
    """Scores and their product with v, a matmul for each head; the softmax between them is traffic. A mask saves no FLOPs."""
    groups = context.size(BATCH) * context.size("heads")
    return (
        Matmul(m=queries, n=keys, k=context.size("head_dim"), dtype=context.compute, groups=groups),
        Matmul(m=queries, n=context.size("v_head_dim"), k=keys, dtype=context.compute, groups=groups),
    )


def _context_parallel(context: Context) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Keys and values around a ring, gathered, or heads traded for sequence (Ulysses, arXiv 2309.14509)."""
    if context.cp == 1:
        return (), ()
    tokens: tuple[str, ...] = (BATCH, SEQ)
    q = context.buffer("q", (*tokens, "heads", "head_dim")).bytes
    k = context.buffer("k", (*tokens, "kv_heads", "head_dim")).bytes
    v = context.buffer("v", (*tokens, "kv_heads", "v_head_dim")).bytes
    out = context.buffer("out", (*tokens, "heads", "v_head_dim")).bytes
    if context.cp_kind == "ulysses":
        each = tuple(Exchange(kind="all_to_all", axis="cp", payload_bytes=size) for size in (q, k, v, out))
        return each, each
    whole = (k + v) * context.cp
    if context.cp_kind == "allgather":
        gather = Exchange(kind="all_gather", axis="cp", payload_bytes=whole)
        return (gather,), (gather, Exchange(kind="reduce_scatter", axis="cp", payload_bytes=whole))
    ring = Exchange(kind="all_gather", axis="cp", payload_bytes=whole, behind="attention")
    return (ring,), (ring, Exchange(kind="reduce_scatter", axis="cp", payload_bytes=whole, behind="attention"))


# -- the ends of the model


def _vocabulary_parallel(op: Op, context: Context) -> OpWork:
    """Each rank looks up its part of the vocabulary; the results are added up (Megatron-Core VocabParallelEmbedding)."""
    whole = context.buffer("embedding", (BATCH, SEQ, "hidden")).bytes
    sent = Exchange(kind="reduce_scatter" if context.sp else "all_reduce", axis="tp", payload_bytes=whole)
    returned = (Exchange(kind="all_gather", axis="tp", payload_bytes=whole),) if context.sp else ()
    return OpWork(
        name=f"{op.name} exchange",
        module=op.module,
        forward=Pass(exchanges=(sent,)),
        backward=Pass(exchanges=returned),
    )


def _split_loss(op: Op, context: Context) -> OpWork:
    """Row maxima, the target's logit and row sums, one fp32 a token each (Megatron-Core tensor_parallel/cross_entropy.py)."""
    row = context.buffer("row", (BATCH, SEQ), "fp32").bytes
    sent = tuple(Exchange(kind="all_reduce", axis="tp", payload_bytes=row) for _ in range(3))
    return OpWork(name=f"{op.name} exchange", module=op.module, forward=Pass(exchanges=sent), backward=Pass())


# -- everything else: kernels bound by memory


def _sizes(block: Block, steps: tuple[Step, ...], context: Context) -> dict[str, int]:
    sizes = {block.input.name: context.buffer(block.input.name, block.input.dims, context.residual).bytes}
    for step in steps:
        for buffer in step.writes:
            sizes[buffer.name] = buffer.bytes
        for view, of in step.aliases:
            if isinstance(view, Buffer):
                sizes[view.name] = view.bytes
            else:
                sizes[view] = sizes.get(of, 0)
    return sizes


_SENT = ("all_to_all", "all_to_all_back", "exchange.")


def _pointwise(steps: tuple[Step, ...], named: frozenset[str], context: Context) -> Iterator[Step]:
    """Steps that are no matmul, no fused attention and nothing on a wire."""
    fused = context.attention not in ("eager", "math")
    for step in steps:
        if step.name in named and (fused or step.name != "attention"):
            continue
        if step.op in ("matmul", "grouped_matmul", "all_to_all") or step.name.startswith(_SENT):
            continue
        if step.writes or step.saves:
            yield step


_KINDS: tuple[tuple[str, MemoryKind], ...] = (
    ("norm", "norm"),
    ("softmax", "softmax"),
    ("probabilities", "softmax"),
    ("loss", "cross_entropy"),
    ("permute", "permute"),
    ("sort", "permute"),
)


def _kind(step: Step) -> MemoryKind:
    return next((kind for word, kind in _KINDS if word in step.name), "pointwise")


def _kernel(step: Step, sizes: dict[str, int], context: Context) -> OpWork:
    """Forward: reads what it takes, writes what it makes. Backward: reads what it saved and the gradient, writes the inputs'."""
    kind = _kind(step)
    read = sum(sizes.get(name, 0) for name in step.reads)
    written = sum(buffer.bytes for buffer in step.writes)
    made = step.writes[0].bytes if step.writes else 0
    grads = [sizes.get(name, 0) for name in step.reads if name not in step.no_grad and name not in step.passes]
    saved = sum(sizes.get(name, 0) for name in step.saves)
    back = saved + made + sum(grads) if grads or step.weights else 0
    return OpWork(
        name=step.name,
        module=step.module,
        forward=Pass(traffic=(Traffic(bytes=read + written, kind=kind),)),
        backward=Pass(traffic=(Traffic(bytes=back, kind=kind),) if back else ()),
    )


def _views(steps: tuple[Step, ...], sizes: dict[str, int]) -> list[OpWork]:
    """The gradients of several views of one tensor are copied into one (a split's backward)."""
    read = {name for step in steps for name in step.reads}
    found = []
    for step in steps:
        used = [view.name if isinstance(view, Buffer) else view for view, _ in step.aliases]
        if len(used) > 1 and not step.writes and read.intersection(used):
            copied = 2 * sum(sizes.get(name, 0) for name in step.reads)
            back = Pass(traffic=(Traffic(bytes=copied, kind="copy"),))
            found.append(OpWork(name=step.name, module=step.module, forward=Pass(), backward=back))
    return found


def _accumulations(steps: tuple[Step, ...], sizes: dict[str, int]) -> list[OpWork]:
    """A tensor that two steps read has two gradients, which autograd adds: two reads and a write."""
    readers: dict[str, int] = {}
    for step in steps:
        for name in step.reads if step.writes or step.saves else ():
            if name not in step.no_grad:
                readers[name] = readers.get(name, 0) + 1
    return [
        OpWork(
            name=f"sum of the gradients of {name}",
            module="",
            forward=Pass(),
            backward=Pass(traffic=tuple(Traffic(bytes=3 * sizes.get(name, 0)) for _ in range(count - 1))),
        )
        for name, count in readers.items()
        if count > 1 and sizes.get(name)
    ]


def stream_bytes(context: Context) -> int:
    """What one pipeline stage sends to the next for a micro-batch."""
    return context.buffer("stream", STREAM, context.residual).bytes
