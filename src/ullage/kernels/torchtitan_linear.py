"""Linears and the embedding in torchtitan, with DTensor's tensor and sequence parallelism and torchao's Float8Linear."""

from __future__ import annotations

from ullage.kernels.narrow import narrow_type, operand_bytes, stays_wide
from ullage.kernels.step import Buffer, Context, Step, WeightGrad
from ullage.kernels.torchtitan_version import saves_abs
from ullage.model.graph import BATCH, SEQ, Dim, Op


def gathers(context: Context) -> bool:
    return context.sp and context.tp > 1


def whole_name(tensor: str) -> str:
    """The gathered twin of a sequence-parallel tensor."""
    return f"{tensor}.gathered"


def runs_fp8(op: Op, context: Context) -> bool:
    """Float8Linear and mxfp8's replace the layers' linears, not the head's."""
    return bool(context.option("float8_recipe")) and op.kind == "linear" and not stays_wide(op)


def linear(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """One matmul. Saves its input; a column-parallel one under sequence parallelism the *gathered* input, once for its group."""
    op = ops[0]
    if op.name == "lm_head" and context.loss == "fused-linear":
        return []  # the chunked loss applies it
    if len(ops) > 1 and op.attrs["group"] != "qkv":
        return [step for one in ops for step in linear((one,), context)]
    steps: list[Step] = []
    (source,) = op.inputs
    if gathers(context) and op.attrs["parallel"] == "column":
        name = whole_name(source)
        if _first_of_group(op):
            steps.append(_gather(op, source, name, context))
        source = name
    if len(ops) > 1:
        return [*steps, *_fused(ops, source, context)]
    return [*steps, *_matmul(op, source, context)]


def _fused(ops: tuple[Op, ...], source: str, context: Context) -> list[Step]:
    """One matmul for q, k and v, which are views of its output: whoever saves one of them keeps all (FusedQKVLinear)."""
    parts = [step for op in ops for step in _matmul(op, source, context, "qkv") if step.op in ("matmul", NVFP4)]
    outputs = [context.tensor(op.outputs[0]) for op in ops]
    whole = Buffer(
        "qkv", sum(part.bytes for part in outputs), "q, k and v", " + ".join(part.formula for part in outputs)
    )
    kept = tuple({buffer.name: buffer for step in parts for buffer in step.writes[1:]}.values())
    return [
        Step(
            name="qkv",
            reads=(source,),
            writes=(whole, *kept),
            saves=tuple(dict.fromkeys(name for step in parts for name in step.saves)),
            scratch=tuple(buffer for step in parts for buffer in step.scratch),
            backward_scratch=tuple(buffer for step in parts for buffer in step.backward_scratch),
            weights=tuple(weight for step in parts for weight in step.weights),
            module=ops[0].module,
            op=parts[0].op,
        ),
        Step(
            name="qkv.split",
            reads=(whole.name,),
            aliases=tuple((part.name, whole.name) for part in outputs),
            module=ops[0].module,
        ),
    ]


def _first_of_group(op: Op) -> bool:
    """One PrepareModuleInput gathers for q, k and v, and one for gate and up."""
    return not op.attrs.get("group") or op.name.split("_")[-2] in ("q", "gate")


def _gather(op: Op, source: str, name: str, context: Context) -> Step:
    inner = op.attrs["in"]
    assert isinstance(inner, tuple)
    whole = context.buffer(name, (BATCH, SEQ, *inner), what=f"input of {op.name}, gathered over the sequence")
    return Step(name=f"{op.name}.gather", reads=(source,), writes=(whole,), module=op.module)


def _matmul(op: Op, source: str, context: Context, name: str = "") -> list[Step]:
    """name: of the linear that it is a part of."""
    output = context.tensor(op.outputs[0], f"{op.name} output")
    weights = tuple(context.weight(param.name, param.dims) for param in op.params)
    reduces = op.attrs["parallel"] == "row" and context.tp > 1
    out = op.attrs["out"]
    assert isinstance(out, tuple)
    made = output
    if reduces:
        made = context.buffer(f"{output.name}.partial", (BATCH, SEQ, *out), what=f"partial output of {op.name}")
    if narrow_type(op, context) == "fp4":
        steps = [_nvfp4(op, source, made, name or op.name, context)]
    else:
        steps = _multiplied(op, source, made, weights, context)
    if reduces:
        steps.append(Step(name=f"{op.name}.reduce", reads=(made.name,), writes=(output,), module=op.module))
    return steps


def _multiplied(op: Op, source: str, made: Buffer, weights: tuple[WeightGrad, ...], context: Context) -> list[Step]:
    casts = _casts(op, source, context) if runs_fp8(op, context) else ()
    compiled = bool(casts) and context.compile
    weight = casts[1:] if compiled and _saves_weight(context) else ()
    input_ = () if compiled and _is_pointwise(op) else (source,)
    passing = tuple(cast for cast in casts if cast not in weight)
    steps = [_amax(op, source, casts, context)] if casts and not context.compile and saves_abs(context) else []
    steps += [
        Step(
            name=op.name,
            reads=(source,),
            writes=(made, *weight),
            saves=(*input_, *(cast.name for cast in weight)),
            scratch=passing,
            backward_scratch=passing,
            weights=weights,
            module=op.module,
            op="matmul",
        )
    ]
    return steps


NVFP4 = "nvfp4_mm"
"""What policies by op would know NVFP4Linear's function by: none does."""


def _nvfp4(op: Op, source: str, made: Buffer, name: str, context: Context) -> Step:
    """torchao's NVFP4Linear keeps input and weight as its backward multiplies them, by columns; dynamo takes its function as one op
    (prototype/moe_training/nvfp4_training/nvfp4_linear.py: allow_in_graph)."""
    inner = op.attrs["in"]
    assert isinstance(inner, tuple)
    operands = [_operand(f"{name}.input", (BATCH, SEQ, *inner), context)]
    operands += [_operand(f"{op.name}.weight", param.dims, context) for param in op.params]
    return Step(
        name=op.name,
        reads=(source,),
        writes=(made, *operands),
        saves=tuple(operand.name for operand in operands),
        weights=tuple(context.weight(param.name, param.dims) for param in op.params),
        module=op.module,
        op=NVFP4,
    )


def _operand(name: str, dims: tuple[Dim, ...], context: Context) -> Buffer:
    numel = context.numel(dims)
    return Buffer(f"{name}_fp4", operand_bytes(numel, "fp4", "nvfp4"), f"{name} in NVFP4, by columns, with scales")


def _amax(op: Op, source: str, casts: tuple[Buffer, ...], context: Context) -> Step:
    """The scale of a tensorwise cast is max(abs(tensor)): eager, abs is a tensor as large, which selective checkpointing once saved."""
    made = tuple(
        Buffer(f"{cast.name}.abs", 2 * cast.bytes, f"absolute value: {cast.what}", f"2 x ({cast.formula})")
        for cast in casts
    )
    return Step(name=f"{op.name}.abs", reads=(source,), writes=made, no_grad=(source,), module=op.module, op="abs")


def _is_pointwise(op: Op) -> bool:
    """Whether the input is a norm's or an activation's output: with fp8 the partitioner recomputes it from what those saved, because
    the cast that the matmul reads is fused with them (traced on torchao 0.18, torch 2.13)."""
    return op.name != "o_proj"


def _saves_weight(context: Context) -> bool:
    """The partitioner saves the 8-bit weight from forward to backward, though FSDP drops the weight itself, unless it is told to cast again
    (torchao ``force_recompute_fp8_weight_in_bwd``) or the weight is gathered in 8 bits."""
    told = context.option("float8_force_recompute_weight_in_bwd") or context.option("force_recompute_fp8_weight_in_bwd")
    return not told and not context.option("float8_all_gather")


def _casts(op: Op, source: str, context: Context) -> tuple[Buffer, ...]:
    """The 8-bit copies of input and weight that the matmul reads."""
    inner = op.attrs["in"]
    assert isinstance(inner, tuple)
    weight = op.params[0].dims if op.params else ()
    return (
        context.buffer(f"{op.name}.input_fp8", (BATCH, SEQ, *inner), "fp8", f"8-bit input of {op.name}"),
        context.buffer(f"{op.name}.weight_fp8", weight, "fp8", f"8-bit weight of {op.name}"),
    )


def embedding(ops: tuple[Op, ...], context: Context) -> list[Step]:
    """Row-parallel: a masked partial result of the whole sequence, then reduced; saves the ids alone."""
    (op,) = ops
    output = context.tensor(op.outputs[0], "embedding output")
    weights = tuple(context.weight(param.name, param.dims) for param in op.params)
    if context.tp == 1:
        return [Step(name=op.name, writes=(output,), weights=weights, module="embedding")]
    partial = context.buffer("embedding.partial", (BATCH, SEQ, "hidden"), what="embedding before its reduction")
    return [
        Step(name=op.name, writes=(partial,), weights=weights, module="embedding"),
        Step(name=f"{op.name}.reduce", reads=(partial.name,), writes=(output,), module="embedding"),
    ]
