"""What an op sends to other ranks: tensor, context and vocabulary parallelism, each by its paper."""

from __future__ import annotations

from collections.abc import Callable

from ullage import dtypes
from ullage.hardware.curve import Kind
from ullage.kernels.step import Context
from ullage.model.graph import BATCH, SEQ, Op
from ullage.timing.work import Exchange, OpWork, Pass


def tensor_parallel(
    op: Op, width: int, rows: int, context: Context
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...]]:
    """What a column- or row-parallel linear sends (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

    width: features of the tensor that is whole on every rank. Gathered inputs and scattered input gradients of a column-parallel
    backward run beside its own matmuls (Megatron-Core tensor_parallel/layers.py, asynchronous handles). Under Transformer Engine's
    user buffers (``tp_comm_overlap``) and torch's asynchronous tensor parallelism (``async_tp``) the others are cut into a piece for
    each rank beside their own matmul too.
    """
    parallel = op.attrs.get("parallel")
    if context.tp == 1 or parallel not in ("column", "row"):
        return (), ()
    whole = dtypes.size_bytes(rows * width, context.compute)
    gathered = dtypes.size_bytes(rows * width, "fp8") if gathers_8_bit(context) else whole

    def exchange(kind: Kind, behind: str = "", pieces: int = 1) -> Exchange:
        payload = gathered if kind == "all_gather" else whole
        return Exchange(kind=kind, axis="tp", payload_bytes=payload, behind=behind, pieces=pieces)

    overlapped = context.stack == "megatron"
    if context.sp and (context.option("tp_comm_overlap") or context.option("async_tp")):
        return _in_pieces(str(parallel), exchange, context.tp, bulk=overlapped)
    if parallel == "column":
        if context.sp:
            gather = exchange("all_gather", "dgrad" if overlapped else "")
            scatter = exchange("reduce_scatter", "wgrad" if overlapped else "")
            return (exchange("all_gather"),), (gather, scatter)
        return (), (exchange("all_reduce", "wgrad" if overlapped else ""),)
    if context.sp:
        return (exchange("reduce_scatter"),), (exchange("all_gather"),)
    return (exchange("all_reduce"),), ()


def gathers_8_bit(context: Context) -> bool:
    """torchao casts before it gathers, where one scale serves the whole tensor (float8/float8_tensor_parallel.py)."""
    return context.fp8 and context.sp and context.option("float8_recipe") == "tensorwise"


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


def vocabulary_parallel(op: Op, context: Context) -> OpWork:
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


def split_loss(op: Op, context: Context) -> OpWork:
    """Row maxima, the target's logit and row sums, one fp32 a token each (Megatron-Core tensor_parallel/cross_entropy.py)."""
    row = context.buffer("row", (BATCH, SEQ), "fp32").bytes
    sent = tuple(Exchange(kind="all_reduce", axis="tp", payload_bytes=row) for _ in range(3))
    return OpWork(name=f"{op.name} exchange", module=op.module, forward=Pass(exchanges=sent), backward=Pass())
