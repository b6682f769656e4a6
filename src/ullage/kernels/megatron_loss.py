"""Megatron's cross entropies over a vocabulary that tensor parallelism divides."""

from __future__ import annotations

from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import BATCH, SEQ, Op

LOGITS = (BATCH, SEQ, "vocab")


def loss(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Vocabulary-parallel cross entropy, native or Transformer Engine's (``cross_entropy_fusion_impl: te``).

    Native: an fp32 copy of the logits becomes the softmax in place and is saved; the bf16 logits live to the end of the loss
    (tensor_parallel/cross_entropy.py). Natively fused, a second fp32 tensor lives for the moment of the loss: an inference from
    the peaks of Megatron's functional tests (the compiled function returns both the shifted logits and their exponentials), not traced.
    """
    (op,) = ops
    (logits,) = op.inputs
    output = context.tensor(op.outputs[0], "loss")
    fused = context.loss == "vocab-parallel-fused"
    if fused and context.option("cross_entropy_fusion_impl") == "te":
        return _transformer_engine(op, context)
    shifted = context.buffer(f"{output.name}.shifted", LOGITS, "fp32", "fp32 logits beside their exponentials")
    beside = (shifted,) if fused else ()
    if context.compute == "fp32":  # .float() copies nothing: softmax and gradient take the logits' own place
        return [_in_place(op, output, _moved(FUSED_FP32 if fused else NATIVE_FP32, context), beside)]
    softmax = context.buffer(f"{output.name}.softmax", LOGITS, "fp32", "softmax of the logits")
    return [
        Step(
            name=op.name,
            reads=(logits,),
            writes=(softmax, output),
            saves=(softmax.name,),
            scratch=beside,
            moves=_moved(FUSED if fused else NATIVE, context),
        ),
    ]


NATIVE = (38, 14)
"""Bytes through memory of one logit, forward and backward, of 16-bit logits: the fp32 copy (6), its maximum (4), subtraction (8),
exponential (8), sum (4) and division (8); then the product with the loss's gradient (8) and the cast (6). Megatron-Core
tensor_parallel/cross_entropy.py; MooreThreads/SimuMax@4dcaae5 test_ce_permute_efficiency.py counts the same."""
FUSED = (26, 6)
"""Compiled piece by piece (fusions/fused_cross_entropy.py): copy (6) and maximum (4); subtracted and exponentiated (8); sum and division
(8); the gradient in one kernel."""
NATIVE_FP32, FUSED_FP32 = (32, 8), (20, 8)
"""The same of fp32 logits: no copy, no cast, and the one kernel's gradient is as wide."""
TRANSFORMER_ENGINE = (6, 4)
"""The row read twice and its gradient written; scaled in the backward (common/triton/cross_entropy.py)."""


def _moved(per_logit: tuple[int, int], context: Context) -> tuple[int, int]:
    logits = context.numel(LOGITS)
    forward, backward = per_logit
    return forward * logits, backward * logits


def _transformer_engine(op: Op, context: Context) -> list[Step]:
    """TE writes the gradient over the bf16 logits during the forward (pytorch/cross_entropy.py, triton kernel).

    So it is in TE before 2.18; from there on an fp32 gradient is saved beside them (pull request 3193), which Megatron-Core up to 0.20
    does not pin.
    """
    return [_in_place(op, context.tensor(op.outputs[0], "loss"), _moved(TRANSFORMER_ENGINE, context))]


def _in_place(op: Op, output: Buffer, moves: tuple[int, int], beside: tuple[Buffer, ...] = ()) -> Step:
    """The gradient takes the logits' own place. beside: lives for the moment of the loss."""
    return Step(
        name=op.name,
        reads=op.inputs,
        writes=(output,),
        saves=op.inputs,
        scratch=beside,
        reuses=op.inputs,
        moves=moves,
    )
