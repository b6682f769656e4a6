"""The work of a block's ops: matmuls and attention from their bound dimensions, the rest from the steps that the stack lowers them to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from ullage import dtypes
from ullage.calibration.matmul import Scales
from ullage.frozen import replace
from ullage.job.adapted import is_adapter
from ullage.job.engine import OF_TRANSFORMERS
from ullage.kernels import stacks
from ullage.kernels.megatron_common import is_local
from ullage.kernels.megatron_graphs import captured, captures, launched
from ullage.kernels.megatron_moe import probabilities_type
from ullage.kernels.narrow import narrow_type, recipe
from ullage.kernels.step import Context, without_experts, without_loss
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, TARGET, Block, Dim, Op
from ullage.timing import partly
from ullage.timing.casts import casts
from ullage.timing.exchanges import (
    context_parallel,
    context_parallel_moves,
    counts_of_all,
    expert_parallel,
    gathered_logits,
    maps_of_all,
    probabilities,
    ring_parts,
    scan_parallel,
    split_loss,
    tensor_parallel,
    vocabulary_parallel,
)
from ullage.timing.traffic import bound_by_memory
from ullage.timing.vintage import cuda_of
from ullage.timing.work import Attention, Exchange, Matmul, OpWork, Pass, Traffic

LINEAR = ("linear", "router", "shared_gate")

SCALES: dict[str, Scales] = {"rowwise": "row", "mxfp8": "block"}
"""By recipe; others have one for each tensor, or are not told apart from it."""

EXPERT_STREAMS = 4
"""Transformer Engine's grouped linear calls cuBLAS for each expert, on four streams in turn (common/gemm/cublaslt_gemm.cu)."""


@lru_cache(maxsize=1024)
def block_work(block: Block, context: Context, accumulates: bool = True) -> tuple[OpWork, ...]:
    """Everything that a block does for one micro-batch, in order. accumulates: matmuls add weights' gradients into an fp32 buffer."""
    told, context = context, launched(context)
    found, named = _named_work(block, context, accumulates)
    steps = stacks.lower(block, context)
    if partly.is_partly_trained(block):
        found = tuple(partly.asked_for(found, block, steps, context))
    found = (*found, *bound_by_memory(block, steps, named, context))
    return (*found, _copied_in(block, told)) if captures(told) and captured(steps, told) else found


def _copied_in(block: Block, context: Context) -> OpWork:
    """A graph copies its input to the address that it was captured with, its backward the gradient (TransformerEngine pytorch/graph.py,
    Graphed.forward and backward)."""
    stream = context.buffer(block.input.name, block.input.dims, context.residual).bytes
    copy = Pass(traffic=(Traffic(bytes=2 * stream, kind="copy"),))
    return OpWork(name="layer_graph", module="layer_graph", forward=copy, backward=copy)


def dense_work(block: Block, context: Context, accumulates: bool = True) -> tuple[OpWork, ...]:
    """Its matmuls, attention and exchanges that are the same under any expert parallelism: known before a stack lowers its ops, at a tenth
    of the price."""
    return _some_work(block, context, accumulates, experts=False)


def experts_work(block: Block, context: Context, accumulates: bool = True) -> tuple[OpWork, ...]:
    """Those of its experts, and what is sent to them."""
    return _some_work(block, context, accumulates, experts=True)


def _some_work(block: Block, context: Context, accumulates: bool, *, experts: bool) -> tuple[OpWork, ...]:
    found = tuple(
        [work for works, _ in _works(block, context, accumulates, experts=experts).values() for work in works]
    )
    return tuple(partly.at_least(found, block)) if partly.is_partly_trained(block) else found


def _named_work(block: Block, context: Context, accumulates: bool) -> tuple[tuple[OpWork, ...], frozenset[str]]:
    """With the names of the steps that this work is."""
    each = [_works(block, context, accumulates, experts=experts) for experts in (False, True)]
    in_order = sorted([*each[0].items(), *each[1].items()], key=itemgetter(0))
    found = tuple([work for _, (works, _) in in_order for work in works])
    return found, frozenset().union(*(named for _, (_, named) in in_order))


_Named = tuple[tuple[OpWork, ...], frozenset[str]]
"""Work, and the names of the steps that it is."""


def _works(block: Block, context: Context, accumulates: bool, *, experts: bool) -> Mapping[int, _Named]:
    """Of each group of ops that experts do, or that they do not, by its place in the block."""
    accumulates, context = accumulates and context.stack == "megatron", without_loss(context)
    return _works_of(block, context if experts else without_experts(context), accumulates, experts)


@lru_cache(maxsize=2048)
def _works_of(block: Block, context: Context, accumulates: bool, experts: bool) -> Mapping[int, _Named]:
    found = {}
    gathered = set()
    for at, ops in enumerate(_groups(block, _fuses(context))):
        group = ops[0].attrs.get("group")
        if ops[0].of_experts == experts:
            found[at] = _work_of(ops, context, accumulates, sends=group not in gathered)
        if group and _gathers_once(context):
            gathered.add(group)
    return found


def _work_of(ops: tuple[Op, ...], context: Context, accumulates: bool, *, sends: bool) -> _Named:
    work = _op_work(ops, context, accumulates, sends=sends)
    beside = tuple(partly.adapters(ops[0], work, context)) if work is not None else ()
    named = {one.name for one in beside}
    if ops[0].kind in (*LINEAR, "grouped_linear", "attention"):
        named.update({op.name for op in ops} | {str(ops[0].attrs.get("group"))})
    if ops[0].kind == "conv2d":
        named.add(ops[0].name)
    return (work, *beside) if work is not None else (), frozenset(named)


def _gathers_once(context: Context) -> bool:
    """Whether an input that is cut by tokens is gathered for all projections that read it (torchtitan parallelize.py, PrepareModuleInput;
    trace/sequence.py)."""
    return context.stack == "torchtitan" or (context.stack == "transformers" and context.sp)


def _fuses(context: Context) -> bool:
    """Whether neighbouring projections of one input are one matmul."""
    return context.stack == "megatron"


@lru_cache(maxsize=256)
def _groups(block: Block, fused: bool) -> tuple[tuple[Op, ...], ...]:
    def key(op: Op) -> object:
        group = op.attrs.get("group")
        return group if group and (fused or op.attrs.get("fused")) else op.name

    return tuple(tuple(found) for _, found in groupby(block.ops, key))


def _op_work(ops: tuple[Op, ...], context: Context, accumulates: bool, *, sends: bool) -> OpWork | None:
    """sends: False where a neighbour before it has gathered the input for all."""
    op = ops[0]
    if op.kind in LINEAR:
        return _linear(ops, context, accumulates, sends=sends)
    if op.kind == "grouped_linear":
        return _experts(ops, context, accumulates)
    if op.kind == "attention":
        return _attention(op, context)
    if op.kind == "conv2d":
        return _patches(op, context)
    if op.kind in ("dispatch", "combine") and context.ep > 1:
        sent = Pass(exchanges=(expert_parallel(op, context), *probabilities(op, context)))
        told = Pass(exchanges=(*maps_of_all(op, context), *counts_of_all(op, context), *sent.exchanges))
        return OpWork(name=f"{op.name} exchange", module=op.module, forward=told, backward=sent)
    if op.kind == "ssm" and context.cp > 1:
        return scan_parallel(op, context)
    if op.kind == "embedding" and context.tp > 1:
        return vocabulary_parallel(op, context)
    if op.kind == "loss" and context.tp > 1:
        return gathered_logits(op, context) if context.stack in OF_TRANSFORMERS else split_loss(op, context)
    return None


def _dtype(op: Op, context: Context) -> str:
    """Of a forward's matmul: fewer bits in the layers alone. Megatron's router multiplies 16-bit operands, whatever its logits' type (Core
    moe_utils.py, RouterGatingLinearFunction), but where Transformer Engine is not used."""
    if op.kind == "router" and context.stack == "megatron" and is_local(context):
        return "fp32"
    return narrow_type(op, context) or context.compute


def _scales(dtype: str, context: Context) -> Scales:
    if dtype != "fp8":
        return "tensor"
    return SCALES.get(recipe(context), "tensor")


def _linear(ops: tuple[Op, ...], context: Context, accumulates: bool, *, sends: bool) -> OpWork:
    op = ops[0]
    own = [param for op in ops for param in op.params if not is_adapter(param.name)]
    dims = [param.dims for param in own if len(param.dims) > 1] or [("vocab", "hidden")]
    inner = op.attrs.get("in", (dims[0][-1],))
    assert isinstance(inner, tuple)
    k = context.numel(inner)
    n = sum(context.numel(shape) for shape in dims) // k
    rows = context.numel((BATCH, SEQ if op.attrs.get("parallel") in ("column", "row") else SEQ_SP))
    if TARGET in op.outputs[0].dims:
        rows = context.numel((BATCH, TARGET))
    elif SEQ not in op.outputs[0].dims and SEQ_SP not in op.outputs[0].dims:
        rows = context.numel((BATCH,))  # a head of the first token alone
    dtype = _dtype(op, context)
    forward = Matmul(
        m=rows, n=n, k=k, dtype=dtype, scales=_scales(dtype, context), cuda=cuda_of(context.options, context.stack)
    )
    cast, cast_back = casts(op, forward, context, first=sends)
    backward = forward.transposes(accumulate=accumulates)
    if op.kind == "router" and dtype != "fp32":
        backward, widened = _of_logits(backward, context)
        cast_back = (*cast_back, *widened)
    width = k if op.attrs.get("parallel") == "column" else n
    here, back = tensor_parallel(op, width, rows, dtype, context) if sends else ((), ())
    return OpWork(
        name=op.name if len(ops) == 1 else str(op.attrs["group"]),
        module=op.module,
        forward=Pass(matmuls=(forward,), exchanges=here, traffic=(*cast, *_reordered(here, context))),
        backward=Pass(
            matmuls=backward,
            exchanges=back,
            traffic=(*cast_back, *_reordered(back, context)),
        ),
    )


def _patches(op: Op, context: Context) -> OpWork:
    """A convolution whose steps are as long as it is wide multiplies each patch once; images ask for no gradient."""
    (width, *inside) = op.params[0].dims
    k = context.numel(tuple(inside))
    forward = Matmul(m=context.numel(op.outputs[0].dims[:2]), n=context.size(width), k=k, dtype=context.compute)
    _, of_weight = forward.transposes(accumulate=False)
    return OpWork(name=op.name, module=op.module, forward=Pass(matmuls=(forward,)), backward=Pass(matmuls=(of_weight,)))


def _of_logits(backward: tuple[Matmul, Matmul], context: Context) -> tuple[tuple[Matmul, Matmul], tuple[Traffic, ...]]:
    """The router's backward where its logits are fp32: in TF32 (Transformer Engine common/gemm/cublaslt_gemm.cu), on an input cast up,
    whose gradient is cast down."""
    if context.stack != "megatron" or probabilities_type(context) == context.compute:
        return backward, ()
    first, second = (replace(one, dtype="tf32") for one in backward)
    cast = Traffic(bytes=(2 + 4) * first.m * first.n)
    return (first, second), (cast, cast)


def _reordered(exchanges: tuple[Exchange, ...], context: Context) -> Iterator[Traffic]:
    """The second dimension is cut, batch first: DTensor copies what it scatters into pieces, and joins what it gathers of several
    sequences (torch/distributed/_functional_collectives.py: chunk and cat; of one sequence, a view). Compiled, they are views of one
    sequence, and one kernel each of several: what NCCL and a matmul read lies in one piece."""
    if not _gathers_once(context) or context.tp == 1:
        return
    several = context.size(BATCH) > 1
    for one in exchanges:
        if one.kind in ("reduce_scatter", "all_gather"):
            copied = several or (one.kind == "reduce_scatter" and not context.compile)
            yield Traffic(bytes=2 * one.payload_bytes if copied else 0, kind="copy")


def _experts(ops: tuple[Op, ...], context: Context, accumulates: bool) -> OpWork:
    """Every local expert's rows, at balanced routing: what all ranks of the group send here is what this rank sends."""
    weight = next(param for param in ops[0].params if len(param.dims) > 2)
    experts, _, k = (context.size(dim) for dim in weight.dims)
    n = sum(context.size(param.dims[1]) for op in ops for param in op.params if len(param.dims) > 2)
    rows = max(1, context.size(ROUTED) // experts)
    streams = EXPERT_STREAMS if context.stack == "megatron" else 0
    dtype = _dtype(ops[0], context)
    scales = _scales(dtype, context)
    forward = Matmul(m=rows, n=n, k=k, dtype=dtype, scales=scales, groups=experts, streams=streams)
    cast, cast_back = casts(ops[0], forward, context, first=True) if context.stack == "megatron" else ((), ())
    return OpWork(
        name=ops[0].name,
        module=ops[0].module,
        forward=Pass(matmuls=(forward,), traffic=cast),
        backward=Pass(matmuls=forward.transposes(accumulate=accumulates), traffic=cast_back),
    )


def _attention(op: Op, context: Context) -> OpWork:
    queries, given = (context.size(_dim(op, which)) for which in ("queries", "keys"))
    window = op.attrs.get("window")
    whole = given * context.cp
    keys = min(whole, window) if isinstance(window, int) else whole
    sent, back = context_parallel(context)
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
            causal=bool(op.attrs.get("causal")) and keys == whole and not op.attrs.get("positions"),
            dtype=context.compute,
            parts=ring_parts(context),
        )
        merged, merged_back = ((Traffic(bytes=moved),) if moved else () for moved in context_parallel_moves(context))
        forward = Pass(attention=core, exchanges=sent, traffic=merged)
        backward = Pass(attention=core, exchanges=back, traffic=merged_back)
    return OpWork(name=op.name, module=op.module, forward=forward, backward=backward)


def _dim(op: Op, which: str) -> Dim:
    """Of an attention's queries or keys; added terms of positions carry the causal order, and a kernel that adds them skips nothing."""
    dim = op.attrs.get(which, SEQ)
    assert isinstance(dim, str)
    return dim


def _unfused(queries: int, keys: int, context: Context) -> tuple[Matmul, Matmul]:
    """Scores and their product with v, a matmul for each head; the softmax between them is traffic. A mask saves no FLOPs."""
    groups = context.size(BATCH) * context.size("heads")

    def matmul(n: int, k: int) -> Matmul:
        aligned = all(dtypes.bits(context.compute) * size % 128 == 0 for size in (n, k))
        cuda = cuda_of(context.options, context.stack)
        return Matmul(m=queries, n=n, k=k, dtype=context.compute, groups=groups, aligned=aligned, cuda=cuda)

    return matmul(keys, context.size("head_dim")), matmul(context.size("v_head_dim"), keys)
