"""Work of a model of which a part is trained: matmuls that nobody asks for are not run, adapters' are, packed weights are unpacked first.

A frozen linear has no weight's gradient, and before the first trained parameter nothing has any (kernels/asking.py, which told the steps
so). Adapters multiply in their own type, where autocast does not choose.
"""

from __future__ import annotations

from collections.abc import Iterator

from ullage import dtypes
from ullage.engines.base import optimizer_of
from ullage.frozen import FrozenMap, frozen, replace
from ullage.job.adapted import PACKED, adapters_type, model_type
from ullage.job.job import Job
from ullage.kernels.step import Context, Step
from ullage.memory.rank import Rank
from ullage.model.graph import Block, Op, Param
from ullage.timing.work import Matmul, OpWork, Pass, Traffic

PACKED_BITS = 4


@frozen
class Trained:
    """Of what a rank holds, what has gradients (states.Holds)."""

    rank: Rank

    def numel(self, *, expert: bool) -> int:
        return sum(one.total for one in self.rank.params if one.param.trainable and one.expert == expert)


def of_adapters(job: Job) -> Job:
    """The job as its optimizer sees it: torch's engines step adapters in their own type, without a master (engines/replica.py); modules
    trained in full have the model's, and where there are some all are taken to have the narrower."""
    if job.lora is None or job.engine.name in ("deepspeed", "megatron"):
        return job
    types = [adapters_type(job), *([model_type(job)] if job.lora.modules_to_save else [])]
    own = min(types, key=dtypes.bits)
    optimizer = optimizer_of(job)
    if optimizer.state != "8bit":
        optimizer = replace(optimizer, state=own)
    return replace(job, precision=replace(job.precision, params=own, master=None, grads=own), optimizer=optimizer)


def is_partly_trained(block: Block) -> bool:
    return not block.input.grad or any(not param.trainable for param in block.params)


def adapters(op: Op, work: OpWork, context: Context) -> Iterator[OpWork]:
    """The two small matmuls beside a linear, each with its own backward."""
    found = op.attrs.get("lora")
    if not isinstance(found, FrozenMap):
        return
    low, high = op.params[-2:]
    (base,) = work.forward.matmuls
    casts = context.autocast or context.stack == "unsloth"  # unsloth kernels/fast_lora.py: A.to(dtype)
    dtype = context.compute if casts else str(found["dtype"])
    rank = context.size(low.dims[0])
    shapes = ((low, rank, base.k), (high, context.numel(high.dims[:-1]), context.size(high.dims[-1])))
    for param, n, k in shapes:
        forward = replace(base, n=n, k=k, dtype=dtype)
        backward = Pass(matmuls=forward.transposes(accumulate=False))
        yield OpWork(name=param.name, module=op.module, forward=Pass(matmuls=(forward,)), backward=backward)
    if found.get("dora"):
        yield from _dora(op, replace(base, dtype=dtype), rank, again=bool(found["dropout"]))


def _dora(op: Op, base: Matmul, rank: int, *, again: bool) -> Iterator[OpWork]:
    """An identity matrix through A and B, which has no gradient, and the dropped input through the base (kernels/transformers_dora.py,
    whose steps say what memory bounds of it). base: the linear's matmul in the adapters' type."""
    name = op.params[-3].name
    through = (replace(base, m=base.k, n=rank), replace(base, m=base.k, k=rank))
    for part, forward in zip((f"{name}.A", f"{name}.BA"), through, strict=True):
        yield OpWork(name=part, module=op.module, forward=Pass(matmuls=(forward,)), backward=Pass())
    if again:
        dgrad, _ = base.transposes(accumulate=False)
        yield OpWork(
            name=f"{name}.base", module=op.module, forward=Pass(matmuls=(base,)), backward=Pass(matmuls=(dgrad,))
        )


def asked_for(found: tuple[OpWork, ...], block: Block, steps: tuple[Step, ...], context: Context) -> Iterator[OpWork]:
    """The work that the steps ask for: of a linear's backward the gradients that are there, of an unasked op none."""
    by_name = {step.name: step for step in steps}
    frozen_linears = {
        name
        for op in block.ops
        if op.kind in ("linear", "grouped_linear") and op.params and not op.params[0].trainable
        for name in _names(op)
    }
    packed = {param.name.rpartition(".")[0]: param for param in block.params if param.elements in PACKED}
    for work in found:
        step = by_name.get(work.name)
        backward = work.backward
        if step is None:  # steps of other names, in pieces or joined with neighbours'
            if work.name in frozen_linears:
                backward = replace(backward, matmuls=tuple(one for one in backward.matmuls if one.direction != "wgrad"))
        elif not _asks(step):
            backward = Pass()
        elif backward.matmuls and work.forward.attention is None:
            backward = replace(backward, matmuls=tuple(_matmuls(backward.matmuls, step)))
        forward = work.forward
        if work.name in packed:
            unpacked = (_unpacked(packed[work.name], context),)
            forward = replace(forward, traffic=(*forward.traffic, *unpacked))
            if backward != Pass() and "experts" not in packed[work.name].dims:  # what is unpacked of experts is kept
                backward = replace(backward, traffic=(*backward.traffic, *unpacked))
        yield replace(work, forward=forward, backward=backward)


def at_least(found: tuple[OpWork, ...], block: Block) -> Iterator[OpWork]:
    """Of the work of such a block what is run whatever its steps ask for: known before a stack lowers its ops."""
    frozen_ops = {name for op in block.ops if not all(one.trainable for one in op.params) for name in _names(op)}
    for work in found:
        backward = work.backward if block.input.grad else Pass()
        if work.name in frozen_ops:
            backward = replace(backward, matmuls=tuple(one for one in backward.matmuls if one.direction != "wgrad"))
        yield replace(work, backward=backward)


def _names(op: Op) -> tuple[str, str]:
    """Of its work, alone or joined with its neighbours'."""
    return op.name, str(op.attrs.get("group"))


def _asks(step: Step) -> bool:
    return bool(step.weights) or any(name not in step.no_grad for name in step.reads)


def _matmuls(both: tuple[Matmul, ...], step: Step) -> Iterator[Matmul]:
    """The input's gradient where the input asks for one, the weight's where the weight or its copy does."""
    source, *copies = step.reads
    asks_for = {
        "dgrad": source not in step.no_grad,
        "wgrad": bool(step.weights) or any(copy not in step.no_grad for copy in copies),
    }
    return (one for one in both if asks_for.get(one.direction, True))


def _unpacked(param: Param, context: Context) -> Traffic:
    """A packed weight read and its whole written (bitsandbytes functional.py, dequantize_4bit)."""
    bits = PACKED_BITS + dtypes.bits(context.compute)
    return Traffic(bytes=context.numel(param.dims) * bits // 8, kind="copy")
