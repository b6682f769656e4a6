"""What a backward runs again of a block's forward: all of it, modules, or what a policy by op does not keep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ullage.frozen import frozen, replace
from ullage.job.job import Recompute
from ullage.kernels import stacks
from ullage.kernels.megatron_graphs import launched
from ullage.kernels.step import Context, Segment, Step
from ullage.memory.chunk import CHECKPOINT, SELECTIVE
from ullage.model.graph import Block
from ullage.timing.ops import block_work
from ullage.timing.work import OpWork, Pass


@frozen
class Again:
    """names: steps that run again, and the ops that they are made of. known: all steps of the block. modules: of those that run again."""

    names: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()

    def runs(self, name: str, module: str) -> bool:
        return name in self.names if name in self.known else module in self.modules


@lru_cache(maxsize=4096)
def run_again(block: Block, context: Context, mode: str, recompute: Recompute, early_stop: bool) -> Again:
    """mode: of memory/chunk.py. early_stop: of a checkpointed block (``Segment``)."""
    if mode not in (CHECKPOINT, SELECTIVE):
        return Again()
    context = launched(context)
    steps = stacks.lower(block, context)
    cuts = context.compile and not _checkpoints_compiled(context)
    early_stop = early_stop and not _checkpoints_compiled(context)
    segments: tuple[Segment, ...] = (Segment(start=0, stop=len(steps), early_stop=early_stop),)
    if mode == SELECTIVE:
        segments = stacks.segments(block, context, recompute)
    again = [step for one in segments for step in (_wanted(steps, one) if cuts else _replayed(steps, one))]
    return Again(
        names=frozenset(name for step in again for name in _names(step)),
        known=frozenset(name for step in steps for name in _names(step)),
        modules=frozenset(step.module for step in again),
    )


def _checkpoints_compiled(context: Context) -> bool:
    """torchtune compiles a layer and checkpoints what is compiled (recipes: compile_model, then set_activation_checkpointing): no
    compiler sees what the backward needs of it, and its last graph, with the MLP, runs to its end before anything is kept."""
    return context.compile and context.stack == "torchtune"


def work_again(
    block: Block, context: Context, mode: str, recompute: Recompute, *, early_stop: bool
) -> tuple[OpWork, ...]:
    """What the backward runs again of a block in this mode: the forwards of these."""
    found = _again(block, context, mode, recompute, early_stop)
    return tuple(replace(work, forward=forward) for work, forward in found)


def passes_again(
    block: Block, context: Context, mode: str, recompute: Recompute, *, early_stop: bool
) -> tuple[tuple[str, Pass], ...]:
    """These forwards alone, with their ops' names: a search asks for thousands."""
    return tuple((work.name, forward) for work, forward in _again(block, context, mode, recompute, early_stop))


def _again(
    block: Block, context: Context, mode: str, recompute: Recompute, early_stop: bool
) -> Iterator[tuple[OpWork, Pass]]:
    if mode not in (CHECKPOINT, SELECTIVE):
        return
    again = run_again(block, context, mode, recompute, early_stop)
    for one in block_work(block, context):
        forward = _forward(one, again)
        if forward.matmuls or forward.attention or forward.traffic or forward.exchanges:
            yield one, forward


_NOTHING = Pass()


def _forward(work: OpWork, again: Again) -> Pass:
    """Of a linear whose input is gathered, or whose output is reduced, by steps of their own, one may run again without the other."""
    runs = again.runs(work.name, work.module)
    if not work.forward.exchanges:
        return work.forward if runs else _NOTHING
    sends = [name for how in ("gather", "reduce", "all_reduce") if (name := f"{work.name}.{how}") in again.known]
    if sends and not runs:
        return Pass(exchanges=work.forward.exchanges) if again.names.intersection(sends) else _NOTHING
    if sends and not again.names.intersection(sends):
        return replace(work.forward, exchanges=())
    return work.forward if runs else _NOTHING


def _names(step: Step) -> tuple[str, ...]:
    """One matmul may be several ops, which its weights tell."""
    return (step.name, *(weight.param.rpartition(".")[0] for weight in step.weights))


def _kept(step: Step, segment: Segment) -> bool:
    return bool(step.writes) and step.writes[0].name in segment.keep


def _replayed(steps: tuple[Step, ...], segment: Segment) -> Iterator[Step]:
    """Eager: every op in order, but for those whose results are kept, up to where the last tensor that a backward needs is there."""
    stop = segment.stop
    if segment.early_stop and not segment.discards_output:
        while stop > segment.start and not steps[stop - 1].saves:
            stop -= 1
        if stop > segment.start and set(steps[stop - 1].saves) <= set(steps[stop - 1].reads):
            stop -= 1
    return (step for step in steps[segment.start : stop] if not _kept(step, segment))


def _wanted(steps: tuple[Step, ...], segment: Segment) -> Iterator[Step]:
    """Compiled: what a backward reads, and what that is made of (torch/_functorch/partitioners.py)."""
    wanted = {name for step in steps for name in step.saves}
    for step in reversed(steps[segment.start : segment.stop]):
        if not _kept(step, segment) and wanted.intersection(step.made):
            wanted.update(step.reads)
            yield step
