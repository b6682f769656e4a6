"""What an op sends to other ranks: tensor, context and vocabulary parallelism, each by its paper."""

from __future__ import annotations

import math
from collections.abc import Callable

from ullage import dtypes
from ullage.comm.volume import once_each
from ullage.hardware.curve import Kind
from ullage.kernels import megatron_mamba
from ullage.kernels.megatron_moe import gathers, pads_to_capacity, probabilities_type, weighted_after
from ullage.kernels.narrow import PER_TENSOR, operand_bytes, recipe
from ullage.kernels.step import Context
from ullage.kernels.torchtitan_attention import ring_heads
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, Op, Tensor
from ullage.timing.dispatch import gathers_maps, sends_once
from ullage.timing.vintage import of_2021, of_2022
from ullage.timing.work import Exchange, OpWork, Pass


def tensor_parallel(
    op: Op, width: int, rows: int, dtype: str, context: Context
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """``_split``, and what ranks agree on before each casts its part of a tensor that has one scale: the largest of their maxima, of a
    column-parallel input and of the gradient of a row-parallel output (Transformer Engine csrc/quantizer.cpp, with_amax_reduction)."""
    here, back = _split(op, width, rows, dtype, context)
    agrees = context.stack == "megatron" and recipe(context) in ("tensorwise", "nvfp4")
    if dtype == context.compute or not agrees or not gathers_narrow(context):
        return here, back
    largest = Exchange(kind="all_reduce", axis="tp", payload_bytes=4)
    if op.attrs.get("parallel") == "column" and here:
        here = (largest, *here)
    if op.attrs.get("parallel") == "row" and back:
        back = (largest, *back)
    return here, back


def _split(
    op: Op, width: int, rows: int, dtype: str, context: Context
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What a column- or row-parallel linear sends (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

    width: features of the tensor that is whole on every rank. dtype: that the matmul multiplies. Gathered inputs and scattered input
    gradients of a column-parallel backward run beside its own matmuls (Megatron-Core tensor_parallel/layers.py, asynchronous handles).
    Under Transformer Engine's user buffers (``tp_comm_overlap``) and torch's asynchronous tensor parallelism (``async_tp``) the others are
    cut into a piece for each rank beside their own matmul too.
    """
    parallel = op.attrs.get("parallel")
    if context.tp == 1 or parallel not in ("column", "row"):
        return (), ()
    whole = dtypes.size_bytes(rows * width, context.compute)
    gathered = _gathered_bytes(rows * width, dtype, str(parallel), context)

    def exchange(kind: Kind, behind: str = "", pieces: int = 1) -> Exchange:
        payload = gathered if kind == "all_gather" else whole
        return Exchange(kind=kind, axis="tp", payload_bytes=payload, behind=behind, pieces=pieces)

    overlapped = context.stack == "megatron"
    if context.sp and (context.option("tp_comm_overlap") or context.option("async_tp")):
        return _in_pieces(str(parallel), exchange, context.tp, bulk=overlapped)
    if parallel == "column":
        if (
            context.sp and context.stack == "transformers"
        ):  # what was gathered is kept (kernels/transformers_parallel.py)
            return (exchange("all_gather"),), (exchange("reduce_scatter"),)
        if context.sp:
            gather = exchange("all_gather", "dgrad" if overlapped else "")
            scatter = exchange("reduce_scatter", "wgrad" if overlapped else "")
            return (exchange("all_gather"),), (gather, scatter)
        return (), (exchange("all_reduce", "wgrad" if overlapped else ""),)
    if context.sp:
        return (exchange("reduce_scatter"),), (exchange("all_gather"),)
    return (exchange("all_reduce"),), ()


def _gathered_bytes(numel: int, dtype: str, parallel: str, context: Context) -> int:
    """The gradient that a row-parallel backward gathers is multiplied in two orders: where operands have a scale for each block, both are
    made of it, and sent (Transformer Engine pytorch/distributed.py, _all_gather_mxfp8)."""
    if dtype == context.compute or not gathers_narrow(context):
        return dtypes.size_bytes(numel, context.compute)
    twice = parallel == "row" and context.stack == "megatron" and recipe(context) not in PER_TENSOR
    return operand_bytes(numel, dtype, recipe(context)) * (2 if twice else 1)


def gathers_narrow(context: Context) -> bool:
    """Whether what is multiplied in 8 bits is cast before it is gathered: by Transformer Engine (pytorch/distributed.py,
    gather_along_first_dim with a quantizer), by torchao where one scale serves the whole tensor (float8/float8_tensor_parallel.py)."""
    if context.narrow is None or not context.sp:
        return False
    return context.stack == "megatron" or context.option("float8_recipe") == "tensorwise"


def _in_pieces(
    parallel: str, exchange: Callable[..., Exchange], tp: int, *, bulk: bool
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """bulk: what a column-parallel backward sends has a matmul beside it that does not need it."""
    if parallel == "column":
        back = exchange("all_gather", "dgrad"), exchange("reduce_scatter", "wgrad")
        pieces = exchange("all_gather", "wgrad", tp), exchange("reduce_scatter", "dgrad", tp)
        return (exchange("all_gather", "forward", tp),), back if bulk else pieces
    return (exchange("reduce_scatter", "forward", tp),), (exchange("all_gather", "dgrad", tp),)


def context_parallel(context: Context) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Keys and values around a ring, gathered, or heads traded for sequence (Ulysses, arXiv 2309.14509)."""
    if context.cp == 1:
        return (), ()
    if context.stack == "torchtitan" and context.cp_kind != "ulysses":
        return _torch_ring(context)
    if context.cp_kind == "ulysses":
        each = tuple(Exchange(kind="all_to_all", axis="cp", payload_bytes=size) for size in _traded(context))
        return each, each
    _, k, v, _ = _traded(context)
    whole = (k + v) * context.cp
    if context.cp_kind == "allgather":
        gather = Exchange(kind="all_gather", axis="cp", payload_bytes=whole)
        return (gather,), (gather, Exchange(kind="reduce_scatter", axis="cp", payload_bytes=whole))
    ring = Exchange(kind="all_gather", axis="cp", payload_bytes=whole, behind="attention")
    return (ring,), (ring, Exchange(kind="reduce_scatter", axis="cp", payload_bytes=whole, behind="attention"))


def ring_parts(context: Context) -> int:
    """In how many parts attention's keys come, a kernel for each; torch's ring is one too where it gathers them all at once."""
    gathers = context.cp_kind == "allgather" and context.stack == "torchtitan"
    return context.cp if gathers or context.cp_kind == "ring" else 1


def _traded(context: Context) -> tuple[int, int, int, int]:
    """Bytes of a rank's queries, keys, values and output."""
    heads = (("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "v_head_dim"), ("heads", "v_head_dim"))
    q, k, v, out = (context.buffer("traded", (BATCH, SEQ, *dims)).bytes for dims in heads)
    return q, k, v, out


def _torch_ring(context: Context) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """torch's ring with its default rotation (distributed/tensor/experimental/_attention.py): keys and values gathered at once; their
    gradients handed on from rank to rank in fp32, each but the last beside the next part's attention. Compiled, each exchange is waited
    for where it is called (distributed/_functional_collectives.py, _maybe_wrap_tensor), and nothing moves that (inductor's
    reorder_for_compute_comm_overlap is off)."""
    whole = context.cp * _keys_and_values(context)
    handed = dtypes.size_bytes(whole, "fp32") // dtypes.size_bytes(1, context.compute)
    behind, pieces = ("", 1) if context.compile else ("attention", context.cp)
    gather = Exchange(kind="all_gather", axis="cp", payload_bytes=whole, behind=behind)
    gradients = Exchange(kind="reduce_scatter", axis="cp", payload_bytes=handed, behind=behind, pieces=pieces)
    return (gather,), (gather, gradients)


def _keys_and_values(context: Context) -> int:
    """Bytes of a rank's own, as torchtitan exchanges them."""
    heads = ring_heads(context)
    parts = (context.buffer("kv", (BATCH, SEQ, heads, dim)) for dim in ("head_dim", "v_head_dim"))
    return sum(part.bytes for part in parts)


def context_parallel_moves(context: Context) -> tuple[int, int]:
    """Bytes that kernels beside attention move for context parallelism, forward and backward.

    Heads traded for sequence: each tensor is copied before its exchange and after it (Transformer Engine context_parallel.py,
    flash_attn_a2a_communicate; DeepSpeed sequence/layer.py, single_all_to_all).

    Transformer Engine's ring, in 16 bits: the first part's output copied (4), each later one's read and added to it (6); queries' gradients
    likewise, keys' and values' by halves (context_parallel.py, AttnFuncWithCPAndKVP2P).

    torch's ring puts parts together; of the last rank, whose queries see all keys. Forward, of an output element and part: a cast up, and
    for all but the first two differences and a product; compiled, one kernel. Backward: the queries' gradients cast and added; the keys'
    and values' cast, added to half of what was handed on, which is then copied and joined for the next rank.
    """
    if context.cp > 1 and context.cp_kind == "ulysses":
        return 2 * 2 * sum(_traded(context)), 2 * 2 * sum(_traded(context))
    if ring_parts(context) == 1 or context.stack not in ("megatron", "torchtitan"):
        return 0, 0
    element = dtypes.size_bytes(1, context.compute)
    out = context.numel((BATCH, SEQ, "heads", "v_head_dim"))
    q = context.numel((BATCH, SEQ, "heads", "head_dim"))
    if context.stack == "megatron":
        _, k, v, _ = _traded(context)
        put = 4 + 6 * (context.cp - 1)
        return out * put, q * put + (k + v) // element * (4 + 3 * (context.cp - 1))
    kv = _keys_and_values(context) // element
    first, more = (6, 10) if context.compile else (6, 6 + 12 + 8 + 12)
    added, handed = (10, 9) if context.compile else (6 + 12, 3 + 6 + 8 + 8)
    forward = out * (first + more * (context.cp - 1) + 6)
    backward = q * (6 + added * (context.cp - 1) + 6) + kv * (handed * context.cp + 6)
    return forward + 2 * kv * element, backward + 2 * kv * element


def expert_parallel(op: Op, context: Context) -> Exchange:
    """Tokens to their experts' ranks, or back: a copy for each expert (Megatron-Core moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher),
    or one for each rank and each node that has any (DeepEP csrc/kernels/layout.cu, is_token_in_rank, and internode.cu)."""
    rows = context.tensor(Tensor(name="rows", dims=(ROUTED, op.outputs[0].dims[-1]))).bytes
    copies = context.size("top_k") if sends_once(context) else 1
    payload = math.ceil(rows * once_each(copies, context.ep))
    return Exchange(kind="all_to_all", axis="ep", payload_bytes=payload, copies=copies)


def maps_of_all(op: Op, context: Context) -> tuple[Exchange, ...]:
    """Before HybridEP dispatches, each rank gathers which experts every rank's tokens go to, a byte for each of either (DeepEP, branch
    hybrid-ep, deep_ep/hybrid_ep_buffer.py); on the way back it has them still."""
    if op.kind != "dispatch" or not gathers_maps(context):
        return ()
    tokens = context.ep * context.numel((BATCH, SEQ_SP))
    return (Exchange(kind="all_gather", axis="ep", payload_bytes=tokens * context.size("router")),)


def counts_of_all(op: Op, context: Context) -> tuple[Exchange, ...]:
    """Before Megatron's all-to-all each rank gathers how many rows every rank has for every expert, 8 bytes each
    (MoEAlltoAllTokenDispatcher.preprocess); rows that are padded to a capacity are known."""
    if not _sends_rows(op, context) or pads_to_capacity(context):
        return ()
    return (Exchange(kind="all_gather", axis="ep", payload_bytes=8 * context.ep * context.size("router")),)


def probabilities(op: Op, context: Context) -> tuple[Exchange, ...]:
    """Of the rows that Megatron's all-to-all sends, in an all-to-all of their own (token_dispatch), as their gradients: where the experts'
    activation is weighted by them."""
    if not _sends_rows(op, context) or weighted_after(context):
        return ()
    sent = context.buffer("probabilities", (ROUTED,), probabilities_type(context)).bytes
    return (Exchange(kind="all_to_all", axis="ep", payload_bytes=sent),)


def _sends_rows(op: Op, context: Context) -> bool:
    return op.kind == "dispatch" and context.stack == "megatron" and not gathers(context) and not sends_once(context)


def scan_parallel(op: Op, context: Context) -> OpWork:
    """Heads traded for sequence before a scan, and back (Megatron-Core ssm/mamba_context_parallel.py)."""
    dims = (megatron_mamba.exchanged(context), op.outputs[0].dims)
    sent = tuple(
        Exchange(kind="all_to_all", axis="cp", payload_bytes=context.buffer(op.name, traded).bytes) for traded in dims
    )
    both = Pass(exchanges=sent)
    return OpWork(name=f"{op.name} exchange", module=op.module, forward=both, backward=both)


def batch(context: Context, *, labels: bool) -> tuple[Exchange, ...]:
    """What the first rank of a tensor-parallel group has read, for the others: ids, positions and a mask before the first layer, labels and
    whether each counts before the loss (Megatron-LM megatron/training/utils.py, get_batch_on_this_tp_rank), of the whole sequence."""
    options = context.options
    if context.tp == 1 or context.stack != "megatron" or of_2021(options) or of_2022(options):
        return ()
    tokens = context.numel((BATCH, SEQ)) * context.cp
    sizes = [8 * tokens, 4 * tokens if labels else 8 * tokens]
    if not labels and context.option("create_attention_mask_in_dataloader", True):
        sizes.append(context.numel((BATCH, SEQ, SEQ)) * context.cp**2)
    return tuple(Exchange(kind="broadcast", axis="tp", payload_bytes=size) for size in sizes)


def vocabulary_parallel(op: Op, context: Context) -> OpWork:
    """Each rank looks up its part of the vocabulary; the results are added up (Megatron-Core VocabParallelEmbedding), in transformers on
    every rank before it takes its tokens (trace/sequence.py)."""
    whole = context.buffer("embedding", (BATCH, SEQ, "hidden")).bytes
    scatters = context.sp and context.stack != "transformers"
    sent = Exchange(kind="reduce_scatter" if scatters else "all_reduce", axis="tp", payload_bytes=whole)
    returned = (Exchange(kind="all_gather", axis="tp", payload_bytes=whole),) if context.sp else ()
    return OpWork(
        name=f"{op.name} exchange",
        module=op.module,
        forward=Pass(exchanges=(*batch(context, labels=False), sent)),
        backward=Pass(exchanges=returned),
    )


def gathered_logits(op: Op, context: Context) -> OpWork:
    """transformers' plans gather the head's output, and each rank has the loss of all words (kernels/transformers_parallel.py)."""
    whole = context.tp * context.buffer("logits", (BATCH, SEQ, "vocab")).bytes
    gather = Exchange(kind="all_gather", axis="tp", payload_bytes=whole)
    return OpWork(name=f"{op.name} exchange", module=op.module, forward=Pass(exchanges=(gather,)), backward=Pass())


def split_loss(op: Op, context: Context) -> OpWork:
    """Row maxima, the target's logit and row sums, one fp32 a token each (Megatron-Core tensor_parallel/cross_entropy.py)."""
    row = context.buffer("row", (BATCH, SEQ), "fp32").bytes
    agreed = tuple(Exchange(kind="all_reduce", axis="tp", payload_bytes=row) for _ in range(3))
    sent = (*batch(context, labels=True), *agreed)
    return OpWork(name=f"{op.name} exchange", module=op.module, forward=Pass(exchanges=sent), backward=Pass())
