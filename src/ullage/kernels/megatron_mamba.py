"""A Mamba-2 mixer in Megatron-Core, on the kernels of mamba-ssm: convolution and scan in one autograd function, and the norm of each group.

Sources, all read, none traced (the kernels are Triton's and run on no CPU): NVIDIA/Megatron-LM@d98e8a6 megatron/core/ssm/mamba_mixer.py
(_ssm_training) and mamba_context_parallel.py; state-spaces/mamba@e9594ce mamba_ssm/ops/triton/ssd_combined.py
(MambaSplitConv1dScanCombinedFn, _mamba_chunk_scan_combined_fwd and _bwd), ssd_chunk_state.py, ssd_state_passing.py, layernorm_gated.py.

The function saves the projection and the scan's output before its gate; convolution, step sizes, states and scores are made again.
"""

from __future__ import annotations

from math import ceil

from ullage.frozen import replace
from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import BATCH, SEQ, Dim, Op

MODULE = "mamba"
INNER: tuple[Dim, ...] = (BATCH, SEQ, "ssm_inner")

_WHAT = {
    "exchange.projected": "projection after its all-to-all over heads",
    "projected.joined": "projection, its parts joined",
    "projected.ordered": "projection, tokens in order",
    "projected.by_sequence": "projection, sequence by sequence",
    "scanned": "output of the scan, token by token",
    "scanned.by_token": "output of the scan, token by token",
    "scanned.ordered": "output of the scan, tokens as attention has them",
    "exchange.scanned": "output of the scan after its all-to-all over the sequence",
}
"""Copies around the scan, by name."""


def scan(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Convolution and scan of whole sequences, one after the other: where there are several, both sides are transposed copies.

    Under context parallelism each rank trades its part of the sequence for a part of the heads, and back.
    """
    (op,) = ops
    output = context.tensor(op.outputs[0], "output of the scan")
    made = Buffer("scanned.whole", output.bytes, output.what, output.formula)
    read = op.inputs[0]
    before: list[Step] = []
    after: list[Step] = []
    projected = exchanged(context)
    if context.cp > 1:
        before += [
            _copy("exchange.projected", read, projected, context),
            _copy("projected.joined", "exchange.projected", projected, context),
            _copy("projected.ordered", "projected.joined", projected, context, holds=(read, "exchange.projected")),
        ]
        read = "projected.ordered"
        after += [
            _transposed("scanned.by_token", made.name, INNER, context),
            _copy("scanned.ordered", "scanned.by_token", INNER, context),
            replace(_copy("exchange.scanned", "scanned.ordered", INNER, context), writes=(output,)),
        ]
    else:
        after.append(_transposed(output.name, made.name, INNER, context))
    before.append(_transposed("projected.by_sequence", read, projected, context))
    return [*before, _fused(op, "projected.by_sequence", made, context), *after]


def norm(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """RMSNorm over the channels of each group, which the scan has gated: saves its input and one fp32 statistic a group.

    The mixer's frame names the projection until it returns, where the scan has read a copy.
    """
    (op,) = ops
    rstd = context.buffer(f"{op.name}.stats", (BATCH, SEQ, "ssm_groups"), "fp32", f"{op.name} statistics")
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(context.tensor(op.outputs[0], "normed output of the scan"), rstd),
            saves=(*op.inputs, rstd.name),
            weights=tuple(context.weight(param.name, param.dims) for param in op.params),
            holds=("projected.ordered" if context.cp > 1 else "projected",),
            module=op.module,
        )
    ]


def _copy(name: str, read: str, dims: tuple[Dim, ...], context: Context, holds: tuple[str, ...] = ()) -> Step:
    made = context.buffer(name, dims, what=_WHAT[name])
    return Step(name=name, reads=(read,), writes=(made,), module=MODULE, holds=holds)


def _transposed(name: str, read: str, dims: tuple[Dim, ...], context: Context) -> Step:
    """Batch before sequence, or back: of one sequence a view."""
    if context.size(BATCH) > 1:
        return _copy(name, read, dims, context)
    return Step(name=name, reads=(read,), aliases=((name, read),), passes=(read,), module=MODULE, moves=(0, 0))


def _repeats(context: Context) -> int:
    """How often context parallelism repeats a group, so that each rank has one whole: where there are fewer of them than ranks."""
    return max(1, context.cp // context.size("ssm_groups"))


def _groups(context: Context) -> Dim:
    repeats = _repeats(context)
    return "ssm_groups" if repeats == 1 else repeats * context.size("ssm_groups")


def _with_groups(dim: str, context: Context) -> Dim:
    """A dimension that has both state vectors of each group in it."""
    more = 2 * (_repeats(context) - 1) * context.size("ssm_groups") * context.size("ssm_state")
    return context.size(dim) + more if more else dim


def exchanged(context: Context) -> tuple[Dim, ...]:
    """The projection as the scan has it: of this rank's part of the sequence all heads, or as much of the whole sequence's."""
    return (BATCH, SEQ, _with_groups("ssm_in", context))


def _fused(op: Op, read: str, output: Buffer, context: Context) -> Step:
    """The autograd function around convolution and scan.

    In the forward the states of chunks are fp32 until they have been passed on, and gone when the scores are there: no more than the two
    outputs where a state is no longer than a chunk.
    """
    chunk = op.attrs["chunk"]
    assert isinstance(chunk, int)
    before_gate = context.buffer("scanned.before_gate", INNER, what="output of the scan before its gate")
    small = context.buffer(
        "scan.rates", ("ssm_heads",), "fp32", "decay rates, their exponential, step biases", copies=3
    )
    return Step(
        name=op.name,
        reads=(read,),
        writes=(output, before_gate, small),
        saves=(read, before_gate.name, small.name),
        scratch=(_convolved(context), *_steps(context), *_states(chunk, context), _scores(chunk, context)),
        backward_scratch=_backward(chunk, context),
        weights=tuple(context.weight(param.name, param.dims) for param in op.params),
        module=op.module,
        moves=_moved(chunk, context),
    )


def _convolved(context: Context) -> Buffer:
    return context.buffer(
        "convolved",
        (BATCH, SEQ, _with_groups("ssm_conv", context)),
        what="channels and state vectors after the convolution",
    )


def _steps(context: Context) -> tuple[Buffer, ...]:
    dims = (BATCH, SEQ, "ssm_heads")
    return (
        context.buffer("scan.dt", dims, "fp32", "step sizes"),
        context.buffer("scan.decay", dims, "fp32", "cumulative decay"),
    )


def _chunks(chunk: int, context: Context) -> int:
    return ceil(context.size(SEQ) / chunk)


def _chunk_states(name: str, chunk: int, context: Context, dtype: str | None, what: str) -> Buffer:
    return context.buffer(name, (BATCH, _chunks(chunk, context), "ssm_inner", "ssm_state"), dtype, what)


def _states(chunk: int, context: Context) -> tuple[Buffer, ...]:
    return (
        _chunk_states("scan.states", chunk, context, None, "states that chunks begin with"),
        context.buffer("scan.final", (BATCH, "ssm_inner", "ssm_state"), "fp32", "last states"),
    )


def _scores(chunk: int, context: Context, name: str = "scan.scores") -> Buffer:
    dims = (BATCH, _chunks(chunk, context), _groups(context), chunk, chunk)
    return context.buffer(name, dims, "fp32", "products of the state vectors inside chunks")


def _backward(chunk: int, context: Context) -> tuple[Buffer, ...]:
    """What is there beside the projection's gradient at the worse of two moments: when the states' gradients have been passed back, in
    fp32 and in the compute type, or when those of the scores are summed."""
    lasting = (
        _convolved(context),
        context.buffer(
            "convolved.grad",
            (BATCH, SEQ, _with_groups("ssm_conv", context)),
            what="gradient of the convolution's output",
        ),
        context.buffer("scan.dt_in", (BATCH, SEQ, "ssm_heads"), what="step sizes as projected, copied"),
        *_steps(context),
        _scores(chunk, context),
        context.buffer("scanned.grad", INNER, what="gradient of the scan's output before its gate"),
        *(_chunk_states(f"scan.{name}", chunk, context, None, f"{name} of chunks") for name in ("states", "dstates")),
    )
    passing = tuple(
        _chunk_states(f"scan.{name}.fp32", chunk, context, "fp32", f"fp32 {name} of chunks")
        for name in ("states", "dstates")
    )
    vectors: tuple[Dim, ...] = (BATCH, SEQ, _groups(context), "ssm_state")
    summing = (
        context.buffer("scan.vectors.grad", vectors, "fp32", "fp32 gradients of both state vectors", copies=2),
        *(_scores(chunk, context, f"scan.scores.{name}") for name in ("grad", "sum")),
        context.buffer("scan.decay.grad", (BATCH, SEQ, "ssm_heads"), "fp32", "gradients of step sizes", copies=3),
    )
    return (*lasting, *max(passing, summing, key=lambda buffers: sum(one.bytes for one in buffers)))


def _moved(chunk: int, context: Context) -> tuple[int, int]:
    """Bytes that the function's kernels read and write, each tensor once a kernel. Its matmuls are small: 2 x channels x (chunk + 2 x
    state) FLOPs a token forward, against some twenty times as many bytes of channels."""
    channels = context.buffer("", INNER).bytes
    convolved = _convolved(context).bytes
    state = _chunk_states("", chunk, context, None, "").bytes
    wide = _chunk_states("", chunk, context, "fp32", "").bytes
    vectors = context.buffer("", (BATCH, SEQ, _groups(context), "ssm_state"), copies=2).bytes
    wide_vector = context.buffer("", (BATCH, SEQ, _groups(context), "ssm_state"), "fp32").bytes
    steps = sum(one.bytes for one in _steps(context))
    scores = _scores(chunk, context).bytes
    again = 2 * convolved + steps + (channels + wide) + (vectors + scores)
    forward = again + (wide + state) + (scores + vectors + state + 4 * channels)
    gate, into_states, passed = 6 * channels, channels + wide, 2 * (wide + state)
    inside = (3 * channels + scores + state) + 2 * (channels + state + wide_vector) + 2 * (2 * channels + scores)
    rest = 2 * (scores + vectors + wide_vector) + 3 * convolved
    return forward, again + 2 * wide + gate + into_states + passed + inside + rest
