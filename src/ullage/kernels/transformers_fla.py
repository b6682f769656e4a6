"""Kernels in the place of transformers' Python code for a gated DeltaNet: flash-linear-attention's delta rule, causal-conv1d's convolution.

Sources, read, none traced (the kernels are Triton's and CUDA's and run on no CPU): fla-org/flash-linear-attention@bc3b101d
fla/ops/gated_delta_rule/chunk.py (ChunkGatedDeltaRuleFunction), chunk_fwd.py, wy_fast.py, fla/ops/common/chunk_delta_h.py, chunk_o.py,
fla/modules/l2norm.py; Dao-AILab/causal-conv1d@17f4f2f causal_conv1d_interface.py (CausalConv1dFn).
"""

from __future__ import annotations

from ullage.errors import Unsupported
from ullage.job.recurrent import CONVOLUTION, DEFAULTS, RULE
from ullage.kernels.devices import on_cuda
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer, Context
from ullage.kernels.transformers_chunks import number
from ullage.model.delta import CHUNK
from ullage.model.graph import BATCH, SEQ, Dim


def runs_rule(context: Context) -> bool:
    """A CPU runs none of these."""
    return _has(context, RULE)


def runs_convolution(context: Context) -> bool:
    return _has(context, CONVOLUTION)


def _has(context: Context, option: str) -> bool:
    return on_cuda(context, "kernels of a gated DeltaNet") and bool(context.option(option, DEFAULTS[option]))


def rule(tape: Tape, parts: tuple[Value, ...], g: Value, beta: Value, output: Value) -> None:
    """One autograd function: saves queries and keys after their norm, values, the decay's sum inside chunks, beta, and the inverse of
    each chunk's system; all else is made again. Queries, keys and values come as parts of one tensor and are copied (input_guard)."""
    if output.dtype == "fp32":
        raise Unsupported(
            "takes no fp32 (ChunkGatedDeltaRuleFunction)",
            key=f"engine.options.{RULE}",
            value="true",
            remedy=f"set engine.options.{RULE}: false, where transformers runs its own code, or compute in 16 bits",
        )
    q, k, v = parts
    kept = _kept(tape, parts, g)
    tape.emit(
        "delta_rule",
        (*parts, g, beta),
        output,
        what="output of the delta rule",
        beside=kept,
        saves=(*(one.name for one in kept), beta.name),
        scratch=(tape.scratch("q.contiguous", q), tape.scratch("k.contiguous", k), *_inside(tape, v)),
        backward_scratch=_backward(tape, k, v),
        op="delta_rule",
    )


def _kept(tape: Tape, parts: tuple[Value, ...], g: Value) -> tuple[Buffer, ...]:
    q, k, v = parts
    inverse: tuple[Dim, ...] = (BATCH, SEQ, "delta_heads", CHUNK)
    return (
        *(
            tape.context.buffer(f"{one.name}.normed", one.dims, one.dtype, f"{one.name} after its norm")
            for one in (q, k)
        ),
        *(tape.context.buffer(f"{one.name}.rstd", one.rows, "fp32", f"{one.name} norm's statistics") for one in (q, k)),
        tape.context.buffer("v.contiguous", v.dims, v.dtype, "values of the delta rule"),
        tape.context.buffer("g.sum", g.dims, "fp32", "log of the decay, summed inside chunks"),
        tape.context.buffer("chunk.inverse", inverse, v.dtype, "inverse of the delta rule's system in each chunk"),
    )


def _inside(tape: Tape, v: Value) -> tuple[Buffer, ...]:
    """w, u, the states that chunks begin with, and values less what a state predicts: in both directions to their end."""
    return (
        _keys(tape, "chunk.w", v.dtype),
        tape.scratch("chunk.u", v),
        _states(tape, "chunk.states", v.dtype),
        tape.scratch("chunk.values", v),
    )


def _backward(tape: Tape, k: Value, v: Value) -> tuple[Buffer, ...]:
    """Beside the results, where the gradients of w and u are taken back to keys and values (prepare_wy_repr_bwd): a gradient of the key
    for every value head, before those that share one are summed."""
    summed = (tape.scratch("k.grad.summed", k),) if k.dims[2] != "delta_heads" else ()
    return (
        *_inside(tape, v),
        _states(tape, "chunk.states.grad", v.dtype),
        tape.scratch("chunk.u.grad", v),
        _keys(tape, "chunk.w.grad", v.dtype),
        _keys(tape, "k.grad.heads", v.dtype),
        *summed,
    )


def _keys(tape: Tape, name: str, dtype: str) -> Buffer:
    """A key for every value head."""
    return tape.context.buffer(name, (BATCH, SEQ, "delta_heads", "delta_k_dim"), dtype)


def _states(tape: Tape, name: str, dtype: str) -> Buffer:
    chunks = number(tape.context.size(SEQ))
    dims: tuple[Dim, ...] = (BATCH, chunks, "delta_heads", "delta_k_dim", "delta_v_dim")
    return tape.context.buffer(name, dims, dtype, "states that chunks begin with")
