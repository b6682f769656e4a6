"""torchtitan's mixture of experts: router, token reordering, grouped matmuls, all-to-all.

Sources: torchtitan/models/moe.py, torchtitan/distributed/expert_parallel.py.
"""

from __future__ import annotations

from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import BATCH, ROUTED, SENT, SEQ_SP, Op


def router(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Gate, scores of every expert in fp32, top-k: two copies of the scores and the indices."""
    (op,) = ops
    logits = context.buffer("router.logits", (BATCH, SEQ_SP, "router"), what="router logits")
    scores = context.buffer("router.scores", (BATCH, SEQ_SP, "router"), "fp32", "router scores")
    output = context.tensor(op.outputs[0], "routing probabilities")
    indices = context.buffer(
        "router.indices", (BATCH, SEQ_SP, "top_k"), "int64", "chosen experts and token order", copies=2
    )
    return [
        Step(
            name="router.gate",
            reads=op.inputs,
            writes=(logits,),
            saves=op.inputs,
            weights=tuple(context.weight(param.name, param.dims) for param in op.params if not param.buffer),
            module="moe",
        ),
        Step(name="router", reads=(logits.name,), writes=(scores,), saves=(scores.name,), module="moe"),
        Step(
            name="router.topk",
            reads=(scores.name,),
            writes=(output, indices),
            saves=(indices.name,),
            module="moe",
            op="topk",
        ),
    ]


def dispatch(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Each token's row is gathered once per expert that takes it; expert parallelism sends the rows and sorts them again."""
    (op,) = ops
    hidden, scores = op.inputs
    rows = context.tensor(op.outputs[0], "tokens sorted by expert")
    if context.ep * context.etp == 1:
        return [Step(name="dispatch", reads=(hidden, scores), writes=(rows,), no_grad=(scores,), module="moe")]
    sent = context.buffer("dispatch.sent", (SENT, "hidden"), what="tokens in the order of the experts")
    received = Buffer("dispatch.received", rows.bytes, "tokens received by the all-to-all", rows.formula)
    return [
        Step(name="dispatch", reads=(hidden, scores), writes=(sent,), no_grad=(scores,), module="moe"),
        Step(name="all_to_all", reads=(sent.name,), writes=(received,), module="moe", op="all_to_all"),
        Step(name="sort", reads=(received.name,), writes=(rows,), module="moe"),
    ]


def grouped_linear(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """torch._grouped_mm: saves its input; the weight arrives gathered."""
    (op,) = ops
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(context.tensor(op.outputs[0], f"{op.name} output"),),
            saves=op.inputs,
            weights=tuple(context.weight(param.name, param.dims) for param in op.params),
            module=op.module,
            op="grouped_matmul",
        )
    ]


def combine(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """The way back: un-sort, all-to-all, weigh in fp32, and add each token's rows onto it."""
    (op,) = ops
    rows, scores = op.inputs
    size = context.buffer("combine.rows", (ROUTED, "hidden"))
    back = context.buffer("combine.returned", (SENT, "hidden"), what="experts' output, back from the all-to-all")
    weighed_fp32 = context.buffer("combine.fp32", (SENT, "hidden"), "fp32", "experts' output in fp32, weighed")
    steps: list[Step] = []
    if context.ep * context.etp > 1:
        unsorted = Buffer("combine.unsorted", size.bytes, "experts' output, un-sorted", size.formula)
        steps += [
            Step(name="unsort", reads=(rows,), writes=(unsorted,), module="moe"),
            Step(name="all_to_all_back", reads=(unsorted.name,), writes=(back,), module="moe", op="all_to_all"),
        ]
        rows = back.name
    weighed = Buffer("combine.weighed", back.bytes, "experts' output, weighed", back.formula)
    output = context.tensor(op.outputs[0], "combined output of the experts")
    return [
        *steps,
        Step(
            name="weigh",
            reads=(rows, scores),
            writes=(weighed,),
            saves=(rows, scores),
            no_grad=(scores,),
            scratch=() if context.compile else (weighed_fp32,),
            backward_scratch=() if context.compile else (weighed_fp32,),
            module="moe",
        ),
        Step(name="combine", reads=(weighed.name,), writes=(output,), module="moe"),
    ]


def shared_gate(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(context.tensor(op.outputs[0], "gated shared expert output"),),
            saves=op.inputs,
            weights=tuple(context.weight(param.name, param.dims) for param in op.params),
            module="shared_experts",
        )
    ]
