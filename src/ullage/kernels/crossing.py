"""What a block's ops read of blocks before and lend to later ones, told of the steps that they became (graph.py: beside, lends)."""

from __future__ import annotations

from dataclasses import replace

from ullage.kernels.eager import Tape
from ullage.kernels.step import Crossing, Step
from ullage.model.graph import Block


def told(block: Block, tape: Tape, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The first step that reads or names a tensor borrows it, the one that makes it lends it; a gradient is made for one that asks."""
    found = list(steps)

    def crossing(name: str) -> Crossing:
        size = tape.buffer(tape[name]).bytes
        return Crossing(name, name, size, _words(name), grad=name in tape.asking)

    for tensor in block.beside:
        users = [at for at, step in enumerate(steps) if tensor.name in (*step.reads, *step.holds)]
        if users:
            one, first = crossing(tensor.name), found[users[0]]
            read = any(tensor.name in steps[at].reads for at in users)
            sums = tuple([one] if read and one.grad else [])
            found[users[0]] = replace(first, borrows=(*first.borrows, one), sums=(*first.sums, *sums))
    for at, step in enumerate(found):
        lent = tuple(crossing(buffer.name) for buffer in step.writes if buffer.name in block.lends)
        if lent:
            sums = tuple(one for one in lent if one.grad)
            leaf = bool(sums) and not step.reads and not step.weights
            found[at] = replace(step, lends=(*step.lends, *lent), sums=(*step.sums, *sums), leaf=leaf)
    return tuple(found)


def _words(name: str) -> str:
    return _WHAT.get(name, "terms of the positions")


_WHAT = {"encoded": "the encoder's output", "causal_mask": "attention mask"}
