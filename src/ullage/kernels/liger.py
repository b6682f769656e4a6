"""Liger's Triton kernels in the place of transformers' own code, as ``apply_liger_kernel_to_*`` patches a model.

Source: linkedin/Liger-Kernel, transformers/monkey_patch.py and ops/*.py at v0.1 to v0.8. A Llama layer keeps u(6 + 2g + 3a) + 4TH in bf16,
where transformers' keeps u(10 + 2g + 4a) + 4TH (u = tokens x hidden x 2 B, g = kv heads / heads, a = MLP width / hidden).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.errors import Unsupported
from ullage.kernels import fused, liger_loss, transformers, transformers_norm, transformers_rope
from ullage.kernels.eager import Tape, Value
from ullage.kernels.step import Buffer, Context, Segment, Step
from ullage.kernels.transformers_loss import version_of
from ullage.model.graph import Block, Op

PATCHED = frozenset(
    {
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "hunyuan_v1_dense",
        "llama",
        "ministral",
        "mistral",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    }
)
"""Families whose norm, rotary embedding and MLP are all replaced; what has experts is not modelled."""

_OUT_OF_PLACE = frozenset({"exaone4", "gemma2", "gemma3_text", "olmo2", "olmo3"})
"""Families whose norms follow one another with the stream between, so that a norm's gradient is a new tensor (transformers/rms_norm.py;
EXAONE 4: apply_liger_kernel_to_exaone4)."""

_CHUNKS_ONE_PROJECTION = frozenset({"phi3"})
"""Families whose gate and up are halves of one projection, which the kernel asks for as tensors of their own (ensure_contiguous)."""

_MULTIPROCESSORS = {(7, 0): 80, (7, 5): 72, (8, 0): 108, (8, 6): 84, (8, 9): 142, (9, 0): 132, (10, 0): 148}
"""Of the largest card of each compute capability (NVIDIA's architecture papers): a norm's backward has one row of partial sums for each."""


def lower(block: Block, context: Context) -> tuple[Step, ...]:
    """The steps of a block: transformers', with Liger's kernels where its patch puts them."""
    if block.family not in PATCHED or any(op.kind == "router" for op in block.ops):
        raise Unsupported(
            f"has no model of {block.family} here",
            key="stack",
            value="liger",
            allowed=", ".join(sorted(PATCHED)),
            remedy="use stack transformers",
        )
    if context.version is not None and version_of(context) < (4, 0):
        raise Unsupported(
            "is no version of transformers, whose models Liger patches",
            key="stack_version",
            value=context.version,
            remedy="name that of transformers, such as 4.57",
        )
    if context.tp > 1:
        raise Unsupported(
            "is not modelled under tensor parallelism", key="stack", value="liger", remedy="use stack transformers"
        )
    return transformers.written(block, context, _CODE)


def selective(steps: tuple[Step, ...], context: Context) -> tuple[Segment, ...]:
    """transformers' policy by op, of which Liger's kernels are no part: they run again."""
    return transformers.selective(steps, context)


def buffers(context: Context) -> tuple[Buffer, ...]:
    """transformers' own."""
    return transformers.buffers(context)


def norm(tape: Tape, op: Op) -> Value:
    """ops/rms_norm.py: keeps its input and one number a row; its gradient is written over the output's, its weight's summed from
    partial sums in fp32."""
    if op.attrs["norm"] == "layernorm":
        return transformers_norm.norm(tape, op)
    source = tape[op.inputs[0]]
    if op.attrs.get("per_head") is False:  # over all heads of a token at once
        source = replace(source, dims=(*source.dims[:2], tape.context.numel(source.dims[2:])))
    sums = (_partial_sums(tape, op, source),) if op.params else ()
    return fused.rms_norm(tape, op, source, in_place=tape.family not in _OUT_OF_PLACE, sums=sums)


def _partial_sums(tape: Tape, op: Op, source: Value) -> Buffer:
    """Up to 0.3 as many as the input has rows, in the weight's type; since then a row for each multiprocessor (#264)."""
    name = f"{op.name}.partial_sums"
    if liger_loss.release(tape.context) < (0, 4):
        return tape.scratch(name, source, tape.weight_dtype)
    rows = _MULTIPROCESSORS.get(tape.context.compute_capability or (9, 0), max(_MULTIPROCESSORS.values()))
    return tape.context.buffer(name, (rows, source.dims[-1]), "fp32")


def rope(tape: Tape, op: Op) -> None:
    """ops/rope.py: q and k turned where they lie, their gradients too."""
    if tape.family in transformers_rope.JOINS:
        transformers_rope.rope(tape, op)
        return
    tape.module = "rope"
    for name, output in zip(op.inputs, op.outputs, strict=True):
        source = tape[name]
        tape.views(source, (Value(output.name, output.dims, source.dtype),), copies=False)


def activation(tape: Tape, op: Op) -> Value:
    """ops/swiglu.py, ops/geglu.py: keeps gate and up, and writes their gradients over them."""
    tape.module = op.module
    halves = [tape[name] for name in op.inputs]
    if tape.family in _CHUNKS_ONE_PROJECTION:
        halves = [
            tape.emit(f"{one.name}.contiguous", (one,), replace(one, name=f"{one.name}.contiguous"), passes=(one,))
            for one in halves
        ]
    output = tape.like(op.outputs[0], halves[0].dtype)
    return tape.emit(output.name, halves, output, what="gated activation", saves=halves, reuses=halves)


_CODE = transformers.LayerCode(
    kernels={**transformers.KERNELS, "norm": norm, "rope": rope, "activation": activation},
    without_logits=liger_loss.loss,
    gates_first=False,
)
