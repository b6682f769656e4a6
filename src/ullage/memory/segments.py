"""A block's recompute segments: what each reads and hands on, how far it runs again, and when."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.kernels.step import Segment
from ullage.memory.block import BlockSteps


class Segments:
    """discarded: the tensors that nothing after their segment keeps. made_at: the step that makes a tensor."""

    __slots__ = ("_all", "_block", "_number_at", "discarded", "made_at")

    def __init__(self, block: BlockSteps) -> None:
        self._block = block
        self._all = block.segments
        self._number_at = {
            index: number for number, segment in enumerate(self._all) for index in range(segment.start, segment.stop)
        }
        self.made_at = {name: index for index, step in enumerate(block.steps) for name in step.made}
        self.discarded = {
            name
            for segment in self._all
            if segment.discards_output
            for step in block.steps[segment.start : segment.stop]
            for name in step.made
        }

    def __getitem__(self, number: int) -> Segment:
        return self._all[number]

    def at(self, index: int) -> int | None:
        """The number of the segment that a step is in."""
        return self._number_at.get(index)

    def starting_at(self, index: int) -> int | None:
        number = self.at(index)
        return number if number is not None and index == self._all[number].start else None

    def inputs(self, number: int) -> Iterator[str]:
        """What a segment reads of the steps before it, as far as it is the one to keep it: nothing, where no backward will ask for it."""
        segment = self._all[number]
        steps = self._block.steps[segment.start : segment.stop]
        if not any(step.saves for step in steps):
            return
        for step in steps:
            for name in step.reads:
                if self.made_at.get(name, -1) < segment.start and (
                    name != self._block.input or self._block.keeps_input
                ):
                    yield name

    def outputs(self, number: int) -> list[str]:
        """What steps after a segment read of it, and the block's output if it is made there."""
        segment, steps = self._all[number], self._block.steps
        later = {name for step in steps[segment.stop :] for name in step.reads} | {self._block.output}
        return [name for step in steps[segment.start : segment.stop] for name in step.made if name in later]

    def touched(self, number: int) -> list[str]:
        """Every tensor that a segment reads or makes, in the order in which it first does: frees follow it."""
        segment = self._all[number]
        steps = self._block.steps[segment.start : segment.stop]
        return list(dict.fromkeys(name for step in steps for name in (*step.reads, *step.made)))

    def rerun(self, number: int) -> tuple[range, int | None]:
        """The steps of a segment that run again; of them the last, where all it has to do is save its inputs."""
        segment, steps = self._all[number], self._block.steps
        stop = segment.stop
        stops_early = segment.early_stop and not segment.discards_output  # an output that is wanted is computed
        if stops_early:
            while stop > segment.start and not steps[stop - 1].saves:
                stop -= 1
        last = steps[stop - 1]
        ends_early = stops_early and stop > segment.start and set(last.saves) <= set(last.reads)
        return range(segment.start, stop), stop - 1 if ends_early else None

    def needed_by(self, index: int) -> Iterator[int]:
        """The segments that have run again before a step's backward, in order: those whose discarded outputs its own reads, its own,
        and those whose discarded outputs it saves.

        A node that saved nothing asks for nothing, and its backward comes before (torch/utils/checkpoint.py, unpack_hook), unless a node
        around the segment runs it again as a whole.
        """
        number, saves = self.at(index), self._block.steps[index].saves
        if number is not None and (saves or self._all[number].reentrant or self._all[number].discards_output):
            yield from (self._number_at[self.made_at[name]] for name in self.inputs(number) if name in self.discarded)
            yield number
        for name in saves:
            if name in self.discarded and (number is None or self.made_at[name] < self._all[number].start):
                yield self._number_at[self.made_at[name]]
