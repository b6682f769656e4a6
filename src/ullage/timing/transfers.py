"""Everything that one rank sends in a step, exchange by exchange: what the seconds of timing/step.py are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Literal

from ullage.comm.cost import Cost
from ullage.comm.group import Group
from ullage.comm.volume import sent_bytes
from ullage.frozen import frozen, replace
from ullage.memory.chunk import Element
from ullage.memory.rank import placed
from ullage.timing import states
from ullage.timing.blocks import sendings
from ullage.timing.machine import exchange_cost, exchange_group
from ullage.timing.ops import block_work
from ullage.timing.stage import Stage, gathered_on, sent_on
from ullage.timing.work import Exchange, OpWork

Phase = Literal["forward", "recompute", "backward", "step"]
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward", "step")


@frozen
class Transfer:
    """``count`` equal exchanges of a rank's step.

    block, what: whose. phase: "step" is after the last backward. cost: of one by itself. wait_s: what the rank waits for one;
    None where an engine or a schedule overlaps it with others, so that only their sum is known.
    """

    phase: Phase
    block: str
    what: str
    exchange: Exchange
    group: Group
    cost: Cost
    count: int
    wait_s: float | None

    @property
    def wire_bytes(self) -> Fraction:
        """What the rank puts on the wire in a step, by the volume of the algorithm (comm/volume.py)."""
        algorithm: Literal["tree", "ring"] = "tree" if self.cost.algorithm.startswith("tree") else "ring"
        one = sent_bytes(self.exchange.kind, self.exchange.payload_bytes, self.group.ranks, algorithm)
        return self.count * one

    @property
    def sent_s(self) -> float:
        """Seconds on the wire in a step."""
        return self.count * self.cost.seconds


def transfers(stage: Stage) -> tuple[Transfer, ...]:
    """By phase, in each in the order of the step; equal ones of equal blocks are one."""
    counts: Counter[Transfer] = Counter()
    for one in (*_of_ops(stage), *_of_shards(stage), *_of_replicas(stage), *_between_stages(stage)):
        counts[replace(one, count=0)] += one.count
    found = [replace(one, count=count) for one, count in counts.items()]
    return tuple(sorted(found, key=lambda one: PHASES.index(one.phase)))


def _transfer(
    stage: Stage, phase: Phase, block: str, what: str, exchange: Exchange, count: int, wait_s: float | None
) -> Transfer:
    return Transfer(
        phase=phase,
        block=block,
        what=what,
        exchange=exchange,
        group=exchange_group(stage.job, exchange.axis),
        cost=exchange_cost(stage.job, exchange),
        count=count,
        wait_s=wait_s,
    )


def _of_ops(stage: Stage) -> Iterator[Transfer]:
    """Tensor, context, expert and vocabulary parallelism: inside a block, in every micro-batch."""
    elements = [element for elements in stage.elements for element in elements]
    for element in elements:
        yield from _of_passes(stage, "forward", element, block_work(element.block, stage.context))
    for element in reversed(elements):
        again = stage.again(element)
        yield from _of_passes(stage, "recompute", element, again)
        yield from _of_passes(stage, "backward", element, reversed(block_work(element.block, stage.context)))


def _of_passes(stage: Stage, phase: Phase, element: Element, ops: Iterable[OpWork]) -> Iterator[Transfer]:
    count = element.size * stage.micro_batches
    for op in ops:
        work = op.backward if phase == "backward" else op.forward
        for one in sendings(work, stage.place, backward=phase == "backward"):
            name = op.name.removesuffix(" exchange")
            yield _transfer(stage, phase, element.block.name, name, one.exchange, count, one.wait_s)


def _of_shards(stage: Stage) -> Iterator[Transfer]:
    """Parameters gathered and gradients reduced, block by block."""
    job, graph = stage.job, stage.graph
    micro_batches = stage.micro_batches
    forwards = 1 if states.resident(job) else micro_batches
    for elements in stage.elements:
        for element in elements:
            for one in states.gathers(job, graph, element.block):
                yield _transfer(stage, "forward", element.block.name, "parameters", one, forwards * element.size, None)
    for at, elements in reversed(list(enumerate(stage.elements))):
        again = states.gathered_again(job, graph, stage.rank, at)
        for element in reversed(elements):
            name, size = element.block.name, element.size
            for one in states.gathers(job, graph, element.block) if name in again else ():
                yield _transfer(stage, "backward", name, "parameters", one, micro_batches * size, None)
            for one in states.reduced(job, graph, element.block):
                yield _transfer(stage, "backward", name, "gradients", one, states.reductions(job) * size, None)


def _of_replicas(stage: Stage) -> Iterator[Transfer]:
    for exchange, count, wait_s in stage.replicas():
        gathers = exchange.kind == "all_gather"
        what = "parameters" if gathers else "gradients"
        yield _transfer(stage, "step" if gathers else "backward", "stage", what, exchange, count, wait_s)


def _between_stages(stage: Stage) -> Iterator[Transfer]:
    sent, gathered = sent_on(stage.job, stage.context), gathered_on(stage.job, stage.context)
    if sent is None:
        return
    micro_batches = stage.micro_batches
    here = placed(stage.job.layout, stage.rank.index)
    for chunk, number in zip(stage.rank.chunks, here, strict=True):
        ahead, behind = not chunk.last and number + 1 not in here, not chunk.first and number - 1 not in here
        if ahead:
            yield _transfer(stage, "forward", "stage", "activations", sent, micro_batches, None)
        if behind:
            yield _transfer(stage, "backward", "stage", "their gradients", sent, micro_batches, None)
        if gathered and behind:
            yield _transfer(stage, "forward", "stage", "activations", gathered, micro_batches, None)
        if gathered and ahead:
            yield _transfer(stage, "backward", "stage", "their gradients", gathered, micro_batches, None)
