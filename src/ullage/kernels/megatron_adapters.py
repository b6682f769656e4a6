"""Low-rank adapters beside Megatron's linears, as Megatron-Bridge runs them (peft/utils.py, ParallelLinearAdapter; lora_layers.py,
LoRALinear): read at NVIDIA-NeMo/Megatron-Bridge@067f987, not traced.

A and B are Megatron's own parallel linears, which gather what they make. Under sequence parallelism the input of a column-parallel A is
gathered before it and kept whole; with ``sequence_parallel_input_regather`` A keeps its part and gathers it again in the backward.
"""

from __future__ import annotations

from ullage.frozen import FrozenMap
from ullage.kernels.megatron_common import gathers
from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import BATCH, ROUTED, SEQ, SEQ_SP, Dim, Op


def beside(output: Buffer) -> Buffer:
    """What the base linear makes, to which the adapter's output is added."""
    return Buffer(f"{output.name}.base", output.bytes, f"{output.what} before its adapter", output.formula)


def regathers(context: Context) -> bool:
    captures = context.option("cuda_graph_impl") not in (None, "none")
    return gathers(context) and bool(context.option("sequence_parallel_input_regather")) and not captures


def added(op: Op, output: Buffer, context: Context) -> list[Step]:
    """base + B(A(dropout(x))) x scaling, into ``output``."""
    low, high = op.params[-2:]
    prefix = low.name.removesuffix("lora_A")
    rows = (ROUTED,) if op.kind == "grouped_linear" else (BATCH, SEQ)
    row = op.attrs.get("parallel") == "row"
    steps = _input(op, prefix, context)
    source = steps[-1].writes[0].name if steps else op.inputs[0]
    rank = high.dims[-1]
    parts = context.tp > 1 and op.kind == "linear"
    inner = context.buffer(f"{prefix}lora_A.out", (*rows, rank), what=f"low-rank input of {prefix}lora_B")
    again = _again(prefix, op, context)
    steps.append(
        Step(
            name=low.name,
            reads=(source,),
            writes=(inner,),
            saves=(source,),
            scratch=(context.buffer(f"{prefix}lora_A.part", (*rows, *low.dims[:1])),) if parts and not row else (),
            backward_scratch=again,
            weights=(context.weight(low.name, low.dims, fusable=True),),
            serves=((source, (low.name,)), *((one.name, (low.name,)) for one in again)),
            module=op.module,
        )
    )
    made = context.buffer(f"{prefix}lora_B.out", (*rows, high.dims[0]), what=f"output of {prefix}lora_B")
    steps.append(
        Step(
            name=high.name,
            reads=(inner.name,),
            writes=(made,),
            saves=(inner.name,),
            weights=(context.weight(high.name, high.dims, fusable=True),),
            serves=((inner.name, (high.name,)),),
            module=op.module,
        )
    )
    for name, dims, what in _whole_again(row and parts, context):
        whole = context.buffer(f"{prefix}lora_B.{name}", dims, what=f"output of {prefix}lora_B, {what}")
        steps.append(Step(name=f"{prefix}{name}", reads=(made.name,), writes=(whole,), module=op.module))
        made = whole
    scaled = Buffer(f"{prefix}lora_B.scaled", made.bytes, f"output of {prefix}lora_B, scaled", made.formula)
    base = beside(output).name
    return [
        *steps,
        Step(name=f"{prefix}scale", reads=(made.name,), writes=(scaled,), module=op.module),
        Step(
            name=f"{prefix}add",
            reads=(base, scaled.name),
            writes=(output,),
            passes=(base, scaled.name),
            module=op.module,
        ),
    ]


def _input(op: Op, prefix: str, context: Context) -> list[Step]:
    """What makes A's input of the linear's: dropout, and a gather over the sequence."""
    (source,) = op.inputs
    inner = op.params[-2].dims[1:]
    steps: list[Step] = []
    adapter = op.attrs["lora"]
    assert isinstance(adapter, FrozenMap)
    whole = op.attrs.get("parallel") == "column" and gathers(context)
    if adapter["dropout"]:
        rows: tuple[Dim, ...] = (ROUTED,) if op.kind == "grouped_linear" else (BATCH, SEQ_SP if whole else SEQ)
        dropped = context.buffer(f"{prefix}dropped", (*rows, *inner), what=f"input of {prefix}lora_A after dropout")
        mask = context.buffer(f"{prefix}dropout.mask", (*rows, *inner), "bool", f"dropout mask of {prefix}lora_A")
        steps.append(
            Step(name=f"{prefix}dropout", reads=(source,), writes=(dropped, mask), saves=(mask.name,), module=op.module)
        )
        source = dropped.name
    if whole and not regathers(context):
        gathered = context.buffer(
            f"{prefix}gathered", (BATCH, SEQ, *inner), what=f"input of {prefix}lora_A, gathered over the sequence"
        )
        steps.append(Step(name=f"{prefix}lora_A.gather", reads=(source,), writes=(gathered,), module=op.module))
    return steps


def _again(prefix: str, op: Op, context: Context) -> tuple[Buffer, ...]:
    if op.attrs.get("parallel") != "column" or not regathers(context):
        return ()
    dims = (BATCH, SEQ, *op.params[-2].dims[1:])
    return (context.buffer(f"{prefix}lora_A.regathered", dims, what=f"input of {prefix}lora_A, gathered again"),)


def _whole_again(divided: bool, context: Context) -> list[tuple[str, tuple[Dim, ...], str]]:
    """How the output of a row-parallel linear's B becomes like the linear's own: gathered, and scattered over the sequence."""
    if not divided:
        return []
    gathered = ("gather", (BATCH, SEQ, "hidden"), "gathered")
    return (
        [gathered, ("scatter", (BATCH, SEQ_SP, "hidden"), "of its part of the sequence")] if context.sp else [gathered]
    )
