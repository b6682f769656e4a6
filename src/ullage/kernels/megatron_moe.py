"""Megatron-Core's mixture of experts: router, dispatcher, grouped experts (megatron/core/transformer/moe)."""

from __future__ import annotations

from ullage.job.adapted import is_adapter
from ullage.kernels import megatron_adapters
from ullage.kernels.megatron_common import eight_bit_input
from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import BATCH, ROUTED, SEQ_SP, Op


def router(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Scores of every expert in fp32 and the maps made from them.

    Taken as four fp32 tensors of [tokens, experts], 16 E bytes a token: traces of Megatron-Core's router (moe_utils.py) keep about
    15 E + 22 k, of k chosen experts, in logits, probabilities, the dense map and its indices.
    """
    (op,) = ops
    experts = context.buffer(f"{op.name}.scores", (BATCH, SEQ_SP, "router"), "fp32", "router scores and maps", copies=4)
    output = context.tensor(op.outputs[0], "routing probabilities")
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(experts, output),
            saves=(*op.inputs, experts.name),
            weights=tuple(context.weight(param.name, param.dims, "fp32") for param in op.params),
            serves=tuple((name, tuple(param.name for param in op.params)) for name in op.inputs),
            module="moe",
        )
    ]


def dispatch(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Permutation by expert, all-to-all, and the second permutation by local expert."""
    (op,) = ops
    rows = context.tensor(op.outputs[0], "tokens sorted by expert")
    hidden, scores = op.inputs
    if context.ep * context.etp == 1:
        return [Step(name="dispatch", reads=(hidden, scores), writes=(rows,), no_grad=(scores,), module="moe")]
    permuted = Buffer(f"{op.name}.permuted", rows.bytes, "tokens permuted for the all-to-all", rows.formula)
    received = Buffer(f"{op.name}.received", rows.bytes, "tokens received by the all-to-all", rows.formula)
    return [
        Step(name="permute", reads=(hidden, scores), writes=(permuted,), no_grad=(scores,), module="moe"),
        Step(name="all_to_all", reads=(permuted.name,), writes=(received,), module="moe"),
        Step(name="sort", reads=(received.name,), writes=(rows,), module="moe"),
    ]


def grouped_linear(ops: tuple[Op, ...], context: Context) -> list[Step]:
    first = ops[0]
    own = [param for op in ops for param in op.params if not is_adapter(param.name)]
    weights = tuple(context.weight(param.name, param.dims, fusable=True) for param in own)
    name = first.name if len(ops) == 1 else str(first.attrs["group"])
    if len(ops) == 1:
        output = context.tensor(first.outputs[0], f"{first.name} output")
    else:
        output = context.buffer(
            f"{first.outputs[0].name}.fused",
            (ROUTED, "expert_ffn"),
            what="fused gate and up output of the experts",
            copies=len(ops),
        )
    adapted = megatron_adapters.is_adapted(first)
    kept = eight_bit_input(first, name, context)
    saved = tuple(buffer.name for buffer in kept) or first.inputs
    steps = [
        Step(
            name=name,
            reads=first.inputs,
            writes=(megatron_adapters.beside(output) if adapted else output, *kept),
            saves=saved,
            weights=weights,
            serves=tuple((one, tuple(param.name for param in own)) for one in saved),
            module=first.module,
        )
    ]
    if adapted:
        steps += megatron_adapters.added(first, output, context)
    if len(ops) > 1:
        views = tuple((context.tensor(op.outputs[0]), output.name) for op in ops)
        steps.append(Step(name=f"{name}.split", reads=(output.name,), aliases=views, module=first.module))
    return steps


def expert_activation(op: Op, context: Context, *, fused: bool) -> list[Step]:
    """Activation, weighted by the routing probabilities.

    Fused: saves the projection's output alone. Unfused: the activation's output too, for the probabilities' gradient, and the
    product is fp32 before it is cast back (moe/experts.py).
    """
    output = context.tensor(op.outputs[0], "experts' activation output")
    source = f"{op.inputs[0]}.fused" if op.attrs["glu"] else op.inputs[0]
    if fused:
        return [Step(name=op.name, reads=(source,), writes=(output,), saves=(source,), module="moe_act")]
    activated = Buffer(f"{output.name}.plain", output.bytes, "experts' activation before its weighting", output.formula)
    product = context.buffer(f"{output.name}.fp32", op.outputs[0].dims, "fp32", "fp32 product with the probabilities")
    return [
        Step(name=f"{op.name}.act", reads=(source,), writes=(activated,), saves=(source,), module="moe_act"),
        Step(
            name=op.name,
            reads=(activated.name,),
            writes=(output,),
            saves=(activated.name,),
            scratch=(product,),
            backward_scratch=(product,),
            module="moe_act",
        ),
    ]


def combine(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """The way back: un-sort, all-to-all, and the sum over each token's experts."""
    (op,) = ops
    rows, scores = op.inputs
    output = context.tensor(op.outputs[0], "combined output of the experts")
    size = context.buffer("combine.rows", (ROUTED, op.outputs[0].dims[-1]))
    if context.ep * context.etp == 1:
        return [Step(name="combine", reads=(rows, scores), writes=(output,), no_grad=(scores,), module="moe")]
    unsorted = Buffer(f"{op.name}.unsorted", size.bytes, "experts' output, un-sorted", size.formula)
    returned = Buffer(f"{op.name}.returned", size.bytes, "experts' output, back from the all-to-all", size.formula)
    return [
        Step(name="unsort", reads=(rows,), writes=(unsorted,), module="moe"),
        Step(name="all_to_all_back", reads=(unsorted.name,), writes=(returned,), module="moe"),
        Step(name="combine", reads=(returned.name, scores), writes=(output,), no_grad=(scores,), module="moe"),
    ]


def shared_gate(ops: tuple[Op, ...], context: Context) -> list[Step]:
    (op,) = ops
    output = context.tensor(op.outputs[0], "gated shared expert output")
    return [
        Step(
            name=op.name,
            reads=op.inputs,
            writes=(output,),
            saves=op.inputs,
            weights=tuple(context.weight(param.name, param.dims) for param in op.params),
            module="shared_experts",
        )
    ]
