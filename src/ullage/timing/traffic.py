"""Kernels that memory bandwidth bounds: their bytes follow from the steps of a block, so that what a kernel fuses it does not move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from ullage.calibration.memory import MemoryKind
from ullage.kernels.step import Buffer, Context, Step
from ullage.model.graph import Block
from ullage.timing.casts import fuses_experts
from ullage.timing.dispatch import padded, permuted
from ullage.timing.mixture import scores
from ullage.timing.vintage import norms_early
from ullage.timing.work import OpWork, Pass, Traffic


def bound_by_memory(block: Block, steps: tuple[Step, ...], named: frozenset[str], context: Context) -> Iterator[OpWork]:
    """Everything of a block that is no matmul, no fused attention and nothing on a wire. named: steps that are."""
    sizes, types = _sizes(block, steps, context), _types(block, steps, context)
    for step in permuted(_pointwise(steps, named, context), block.ops, context):
        yield _kernel(step, sizes, types, context)
    yield from padded(block.ops, context)
    yield from scores(block, context)
    yield from _views(steps, sizes)
    yield from _accumulations(steps, sizes, types)


_FLOATS = ("fp32", "bf16", "fp16")
"""Types that an op of this kind computes in."""


def _types(block: Block, steps: tuple[Step, ...], context: Context) -> dict[str, str]:
    """Of tensors of floating numbers, by name."""
    types = {block.input.name: context.residual}
    for step in steps:
        for buffer in step.writes:
            types[buffer.name] = buffer.dtype or context.compute
        for view, of in step.aliases:
            if of in types:
                types[view.name if isinstance(view, Buffer) else view] = types[of]
    return {name: dtype for name, dtype in types.items() if dtype in _FLOATS}


def _type_of(step: Step, sizes: Mapping[str, int], types: Mapping[str, str], context: Context) -> str:
    """What most of the bytes that it reads and writes are of."""
    moved: dict[str, int] = {}
    for name in (*step.reads, *[buffer.name for buffer in step.writes]):
        dtype = types.get(name)
        if dtype is not None:
            moved[dtype] = moved.get(dtype, 0) + sizes.get(name, 0)
    return max(moved, key=moved.__getitem__) if moved else context.compute


def _sizes(block: Block, steps: tuple[Step, ...], context: Context) -> dict[str, int]:
    sizes = {block.input.name: context.buffer(block.input.name, block.input.dims, context.residual).bytes}
    told = {tensor.name: tensor for op in block.ops for tensor in op.outputs}
    for step in steps:
        for buffer in step.writes:
            sizes[buffer.name] = buffer.bytes
        for view, of in step.aliases:
            if isinstance(view, Buffer):
                sizes[view.name] = view.bytes
            elif view in told:
                sizes[view] = context.tensor(told[view]).bytes  # q is a view of a part of the fused projection
            else:
                sizes[view] = sizes.get(of, 0)
    return sizes


_SENT = ("all_to_all", "all_to_all_back", "exchange.")
_GATHERED = (".gather", ".reduce")  # tensor parallelism's, told as steps of their own


def _pointwise(steps: tuple[Step, ...], named: frozenset[str], context: Context) -> Iterator[Step]:
    """Steps that are no matmul, no fused attention and nothing on a wire."""
    fused = context.attention not in ("eager", "math")
    inside = ("experts.act", "experts.down_proj.bias") if context.narrow and fuses_experts(context) else ()
    for step in steps:
        if step.name.startswith(inside):
            continue
        if step.name in named and (fused or step.name != "attention"):
            continue
        if (
            step.op in ("matmul", "grouped_matmul", "all_to_all")
            or step.name.startswith(_SENT)
            or step.name.endswith(_GATHERED)
        ):
            continue
        if step.writes or step.saves or step.moves:
            yield step


_KINDS: tuple[tuple[str, MemoryKind], ...] = (
    ("tanh", "tanh"),
    ("norm", "norm"),
    ("softmax", "softmax"),
    ("probabilities", "softmax"),
    ("loss", "cross_entropy"),
    ("permute", "permute"),
    ("sort", "permute"),
    ("ssm", "scan"),
    ("delta_rule", "scan"),
)


def _kinds(step: Step, context: Context) -> tuple[MemoryKind, MemoryKind]:
    """Of the forward and the backward."""
    kind: MemoryKind = next((kind for word, kind in _KINDS if word in step.name), "pointwise")
    if kind == "norm" and context.stack == "megatron" and norms_early(context.options):
        return "early_norm", "early_norm_backward"
    return kind, kind


def _kernel(step: Step, sizes: dict[str, int], types: Mapping[str, str], context: Context) -> OpWork:
    """Forward: reads what it takes, writes what it makes. Backward: reads what it saved and the gradient, writes the inputs'.

    A tensor that lives for the moment of the step alone is what one of its kernels writes and another reads.
    """
    reads = tuple([sizes.get(name, 0) for name in step.reads])
    saved = sum([sizes.get(name, 0) for name in step.saves])
    return _moving(step, reads, saved, _kinds(step, context), _type_of(step, sizes, types, context))


@lru_cache(maxsize=16384)
def _moving(step: Step, reads: tuple[int, ...], saved: int, kinds: tuple[MemoryKind, MemoryKind], dtype: str) -> OpWork:
    """reads: bytes of each tensor that it reads; saved: of those that it saves. Of most steps the same in any expert parallelism."""
    kind, kind_back = kinds
    read = sum(reads)
    written = sum([buffer.bytes for buffer in step.writes])
    made = step.writes[0].bytes if step.writes else 0
    skipped = (*step.no_grad, *step.passes)
    grads = [size for name, size in zip(step.reads, reads, strict=True) if name not in skipped]
    back = saved + made + sum(grads) if grads or step.weights else 0
    passing = 2 * sum(buffer.bytes for buffer in step.scratch)
    passing_back = 2 * sum(buffer.bytes for buffer in step.backward_scratch) if back else 0
    forward, back = step.moves or (read + written + passing, back + passing_back)
    return OpWork(
        name=step.name,
        module=step.module,
        forward=Pass(traffic=(Traffic(bytes=forward, kind=kind, dtype=dtype),)),
        backward=Pass(traffic=(Traffic(bytes=back, kind=kind_back, dtype=dtype),) if back or step.moves else ()),
    )


def _views(steps: tuple[Step, ...], sizes: dict[str, int]) -> list[OpWork]:
    """The gradients of several views of one tensor are copied into one (a split's backward)."""
    read = {name for step in steps for name in step.reads}
    found = []
    for step in steps:
        used = [view.name if isinstance(view, Buffer) else view for view, _ in step.aliases]
        if len(used) > 1 and not step.writes and read.intersection(used):
            copied = 2 * sum(sizes.get(name, 0) for name in step.reads)
            back = Pass(traffic=(Traffic(bytes=copied, kind="copy"),))
            found.append(OpWork(name=step.name, module=step.module, forward=Pass(), backward=back))
    return found


def _accumulations(steps: tuple[Step, ...], sizes: dict[str, int], types: Mapping[str, str]) -> list[OpWork]:
    """A tensor that two steps read has two gradients, which autograd adds: two reads and a write."""
    readers: dict[str, int] = {}
    for step in steps:
        for name in step.reads if step.writes or step.saves else ():
            if name not in step.no_grad:
                readers[name] = readers.get(name, 0) + 1
    return [
        OpWork(
            name=f"sum of the gradients of {name}",
            module="",
            forward=Pass(),
            backward=Pass(
                traffic=(Traffic(bytes=3 * sizes.get(name, 0), dtype=types.get(name, "fp32")),) * (count - 1)
            ),
        )
        for name, count in readers.items()
        if count > 1 and sizes.get(name)
    ]
