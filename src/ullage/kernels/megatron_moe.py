"""Megatron-Core's mixture of experts: router, dispatcher, grouped experts (megatron/core/transformer/moe)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ullage.job.adapted import is_adapted, is_adapter
from ullage.kernels import megatron_adapters
from ullage.kernels.megatron_common import before, narrow_input
from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import BATCH, ROUTED, SENT, SEQ_SP, Op


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
    """Rows brought to their experts: of the rank's own tokens by an all-to-all, or out of the tokens of all ranks.

    All-to-all: permuted by expert, exchanged, gathered where tensor parallelism cuts the experts, sorted where a rank holds several.
    ``allgather``: the tokens of all ranks that share experts lie in the global gather buffer, and each takes its experts' rows out of it.
    Source: token_dispatcher.py, MoEAlltoAllTokenDispatcher and MoEAllGatherTokenDispatcher.
    """
    (op,) = ops
    rows = context.tensor(op.outputs[0], "tokens sorted by expert")
    hidden, scores = op.inputs
    if gathers(context):
        return [
            Step(
                name="dispatch",
                reads=(hidden, scores),
                writes=(rows,),
                no_grad=(scores,),
                backward_scratch=(everybodys(context, f"{op.name}.gathered_grad", "gradient of the gathered tokens"),),
                module="moe",
            )
        ]
    received = SENT if context.etp > 1 else ROUTED  # before the parts of an expert are gathered
    way = [_Leg("permute", SENT, "tokens permuted for the all-to-all")]
    if context.ep > 1:
        way.append(_Leg("all_to_all", received, "tokens received by the all-to-all"))
    if context.etp > 1:
        way.append(_Leg("gather", ROUTED, "tokens of all parts of an expert"))
    if _sorts(context):
        way.append(_Leg("sort", ROUTED, rows.what))
    steps = _travel(way, op, hidden, context, rows)
    return [replace(steps[0], reads=(hidden, scores), no_grad=(scores,)), *steps[1:]]


class _Leg(NamedTuple):
    """One step of the way to the experts or back, and how many rows it makes."""

    name: str
    rows: str
    what: str


def _travel(way: list[_Leg], op: Op, source: str, context: Context, last: Buffer | None = None) -> list[Step]:
    """A step for each leg, each reading what the one before made. last: what the last one makes, if it has a name already."""
    width = op.outputs[0].dims[-1]
    made = [context.buffer(f"{op.name}.{leg.name}", (leg.rows, width), what=leg.what) for leg in way]
    if last is not None:
        made[-1] = last
    reads = [source, *(buffer.name for buffer in made)]
    return [
        Step(name=leg.name, reads=(read,), writes=(buffer,), module="moe")
        for leg, read, buffer in zip(way, reads, made, strict=False)
    ]


def _sorts(context: Context) -> bool:
    return context.size("experts") > 1 and context.ep * context.etp > 1


def gathers(context: Context) -> bool:
    """Whether ranks see the tokens of all who share their experts, and there are several."""
    experts = "experts" in context.sizes
    return experts and context.ep * context.etp > 1 and context.option("moe_token_dispatcher_type") == "allgather"


def pads_to_capacity(context: Context) -> bool:
    """Whether each expert has its capacity of rows, which the host knows without asking."""
    return bool(context.option("moe_pad_expert_input_to_capacity"))


def everybodys(context: Context, name: str, what: str) -> Buffer:
    """A row for each token of the ranks that share the experts."""
    return context.buffer(name, (BATCH, SEQ_SP, "hidden"), what=what, copies=context.ep * context.etp)


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
    adapted = is_adapted(first)
    biased = _adds_bias(first) and not adapted
    plain = Buffer(f"{output.name}.plain", output.bytes, "experts' output before its bias", output.formula)
    kept = narrow_input(first, name, context)
    saved = tuple(buffer.name for buffer in kept) or first.inputs
    steps = [
        Step(
            name=name,
            reads=first.inputs,
            writes=(megatron_adapters.beside(output) if adapted else plain if biased else output, *kept),
            saves=saved,
            weights=weights,
            serves=tuple((one, tuple(param.name for param in own)) for one in saved),
            module=first.module,
        )
    ]
    if adapted:
        steps += megatron_adapters.added(first, output, context)
    if biased:
        steps.append(_biased(first, plain.name, output, context))
    if len(ops) > 1:
        views = tuple((context.tensor(op.outputs[0]), output.name) for op in ops)
        steps.append(Step(name=f"{name}.split", reads=(output.name,), aliases=views, module=first.module))
    return steps


def _adds_bias(op: Op) -> bool:
    """Of the experts' second linear, which hands its bias back; that of the first is part of its matmul (moe/experts.py, skip_bias_add)."""
    return op.outputs[0].dims[-1] != "expert_ffn" and any(param.name.endswith(".bias") for param in op.params)


def _biased(op: Op, plain: str, output: Buffer, context: Context) -> Step:
    """Expert by expert a bias times each row's probability, added and joined again (moe/experts.py, _apply_bias): in the
    probabilities' type, and cast back. Backward the bias' and the probabilities' gradients are products and their sums."""
    rows, width = op.outputs[0].dims
    numel = context.numel((rows, width))
    wide = probabilities_type(context)
    each = context.buffer("", (rows, width), wide).bytes // numel
    cast = 0 if wide == context.compute else each + 2
    forward = each + (2 + each + each) + 2 * each + cast
    backward = cast + (4 if not cast else each + 2 + 4) + 2 * (2 * each + each)
    product = context.buffer(f"{op.name}.biases", (rows, width), wide, "experts' biases, weighted")
    joined = context.buffer(f"{op.name}.biased", (rows, width), wide, "experts' output with its bias")
    return Step(
        name=f"{op.name}.bias",
        reads=(plain,),
        writes=(output,),
        scratch=(product, joined),
        backward_scratch=(product,),
        module=op.module,
        moves=(forward * numel, backward * numel),
    )


def probabilities_type(context: Context) -> str:
    """Of the routing probabilities: that of the router's logits (``moe_router_dtype``; moe_utils.py, probs.type_as)."""
    return "fp32" if context.option("moe_router_dtype") in ("fp32", "fp64") else context.compute


def expert_activation(op: Op, context: Context, *, fused: bool) -> list[Step]:
    """Activation, weighted by the routing probabilities.

    Fused: saves the projection's output alone. Unfused: the activation's output too, for the probabilities' gradient, and the
    product is fp32 before it is cast back (moe/experts.py).
    """
    output = context.tensor(op.outputs[0], "experts' activation output")
    source = f"{op.inputs[0]}.fused" if op.attrs["glu"] else op.inputs[0]
    if fused and op.attrs["form"] == "clamped_silu":
        clamped, clamp = _clamped(op, source, context)
        plain = Step(name=op.name, reads=(clamped,), writes=(output,), saves=(clamped,), module="moe_act")
        return [clamp, plain]
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


def _clamped(op: Op, source: str, context: Context) -> tuple[str, Step]:
    """Both halves of the projection clamped and joined again before the fused kernel (fusions/fused_bias_geglu.py,
    weighted_bias_quick_geglu_impl); clamps keep what they read."""
    whole = context.buffer(f"{source}.clamped", op.outputs[0].dims, what="gate and up, clamped and joined", copies=2)
    halves = Buffer(f"{source}.halves", whole.bytes, "gate and up, each clamped", whole.formula)
    moved = (
        (4 + 4) * whole.bytes // 2,
        (6 + 4) * whole.bytes // 2,
    )  # of an element: clamp and join; clamp's and the halves' backward
    step = Step(
        name=f"{op.name}.clamp",
        reads=(source,),
        writes=(whole,),
        saves=(source,),
        scratch=(halves,),
        backward_scratch=(halves,),
        module="moe_act",
        moves=moved,
    )
    return whole.name, step


WEIGHTED_AFTER_UNTIL = (0, 13)
"""Until April 2025 the experts' output was weighted, not their activation (2659630721, which still names itself 0.12.0rc0)."""

INDEX_ADD_SINCE = (0, 15)
"""Since October 2025 rows are added to their tokens by index_add_ in deterministic mode (56818f9e50)."""


def weighted_after(context: Context) -> bool:
    """Whether the rows that come back are weighted, rather than the experts' activation."""
    return before(context.version, WEIGHTED_AFTER_UNTIL)


def _keeps_rows(context: Context) -> bool:
    """Whether the sum over a token's experts keeps its rows: for the probabilities' gradient where it weights them, and in
    index_add_'s backward, which asks for the shape of its source (torch's derivatives.yaml: grad.index_select(...).expand_as(source))."""
    fused = context.option("moe_permute_fusion", False)
    deterministic = context.option("deterministic_mode", False) and not before(context.version, INDEX_ADD_SINCE)
    return weighted_after(context) or bool(deterministic and not fused)


def combine(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """The way back, and the sum over each token's experts."""
    (op,) = ops
    rows, scores = op.inputs
    output = context.tensor(op.outputs[0], "combined output of the experts")

    def summing(name: str, source: str, into: Buffer) -> Step:
        kept = (source,) if _keeps_rows(context) else ()
        return Step(name=name, reads=(source, scores), writes=(into,), saves=kept, no_grad=(scores,), module="moe")

    if gathers(context):
        summed = everybodys(context, f"{op.name}.summed", "experts' output of the tokens of all ranks")
        scattered = Step(name="reduce_scatter", reads=(summed.name,), writes=(output,), module="moe")
        return [summing("unpermute", rows, summed), scattered]
    way = [_Leg("unsort", ROUTED, "experts' output, un-sorted")] if _sorts(context) else []
    if context.etp > 1:
        way.append(_Leg("reduce_scatter", SENT, "experts' output, summed over their parts"))
    if context.ep > 1:
        way.append(_Leg("all_to_all_back", SENT, "experts' output, back from the all-to-all"))
    steps = _travel(way, op, rows, context)
    back = steps[-1].made[0] if steps else rows
    return [*steps, summing("combine", back, output)]


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
