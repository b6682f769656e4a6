"""A block's steps run forward: the first time, and a recompute segment's again.

A tensor lives until nothing later reads it and no backward needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ullage.kernels.step import Buffer, Segment, Step
from ullage.memory.block import BlockSteps, boundary, carried
from ullage.memory.program import Item
from ullage.memory.segments import Segments
from ullage.memory.storage import Items, Storages


class Forward:
    """Runs the steps of one block; a tensor is held as ("forward", name) or ("again", name) until its last reader."""

    __slots__ = ("_block", "_items", "_live", "_segments")

    def __init__(self, block: BlockSteps, segments: Segments, live: Storages, items: Items) -> None:
        self._block = block
        self._segments = segments
        self._live = live
        self._items = items

    def first(self) -> None:
        """All steps. What a segment holds is not saved: its inputs are kept, and what it keeps by name."""
        indices = range(len(self._block.steps))
        last = self._last_reads(indices, beyond=indices.stop)
        last.pop(self._block.output, None)
        ends = _by_index(last)
        for index in indices:
            step = self._block.steps[index]
            if (entered := self._segments.starting_at(index)) is not None:
                for name in self._segments.inputs(entered):
                    if name not in self._segments.discarded:
                        self._live.hold(name, ("segment", entered))
            scratch = self._make(step, "forward")
            for one in step.lends:
                if one.name in self._block.handed:
                    self._live.hold(one.name, ("outside", one.name))
            self._save_first(index)
            self._live.free(*scratch)
            self._end(ends.get(index, ()), "forward")

    def again(self, number: int, *, backward_at: int) -> None:
        """The steps of a segment, when the backward has come to step ``backward_at``."""
        segment = self._segments[number]
        indices, unmade = self._segments.rerun(number)
        last = self._last_reads(indices, beyond=segment.stop)
        if segment.reentrant:
            for name in self._segments.outputs(number):
                last.pop(name, None)
        ends = _by_index(last)
        for index in indices:
            scratch = []
            if index != unmade:
                scratch = self._make(self._block.steps[index], "again", segment.keep)
                self._take_kept(index, number)
            self._save_again(index, segment, backward_at)
            self._live.free(*scratch)
            self._end(ends.get(index, ()), "again")
        # the context that the recomputation runs in exits, and its caches go
        for name in (name for index in indices for name in self._block.steps[index].caches if index != unmade):
            self._live.let_go(name, ("cache", name))

    def _last_reads(self, indices: range, beyond: int) -> dict[str, int]:
        last: dict[str, int] = {}
        for index in indices:
            step = self._block.steps[index]
            for name in (*step.reads, *step.holds, *step.made):
                last[name] = index
        for step in self._block.steps[
            indices.stop : beyond
        ]:  # not run again; what its frames name lives to where they end
            for name in (*step.reads, *step.holds):
                if name in last:
                    last[name] = indices.stop - 1
        return last

    def _make(self, step: Step, holder_kind: str, kept: Collection[str] = ()) -> list[Item]:
        """Makes what a step makes beside what was kept; returns its scratch, which is live."""
        for buffer in step.writes:
            if buffer.name not in kept:
                self._live[buffer.name] = self._live.new(self._item(step, buffer))
        for view, tensor in step.aliases:
            self._live.view(view, tensor)
        for name in step.made:
            self._live.hold(name, (holder_kind, name))
        for name in step.caches:
            self._live.hold(name, ("cache", name))
        scratch = [self._items.tensor(buffer, "transient", f"forward of {step.name}") for buffer in step.scratch]
        self._live.alloc(*scratch)
        return scratch

    def _take_kept(self, index: int, number: int) -> None:
        """What a step has kept is its result now, once: it lives on as what runs again would (torch/utils/checkpoint.py, _CONSUMED)."""
        for name in self._block.steps[index].made:
            if name in self._segments[number].keep:
                self._live.let_go(name, ("kept", number))

    def _item(self, step: Step, buffer: Buffer) -> Item:
        if buffer.name == self._block.output:
            return boundary(buffer.bytes)
        for one in step.lends:
            if one.name == buffer.name and one.name in self._block.handed:
                return carried(one.bytes, one.slot, one.what)
        return self._items.tensor(
            buffer, "activations", "its forward to its backward if saved, else to its last reader"
        )

    def _end(self, names: Iterable[str], holder_kind: str) -> None:
        for name in names:
            if name in self._live:
                self._live.let_go(name, (holder_kind, name))

    def _save_first(self, index: int) -> None:
        number = self._segments.at(index)
        if number is not None:
            for name in self._block.steps[index].made:
                if name in self._segments[number].keep:
                    self._live.hold(name, ("kept", number))
            return
        for name in self._saved(index):
            if name not in self._segments.discarded:
                self._live.hold(name, ("saved", index))

    def _save_again(self, index: int, segment: Segment, backward_at: int) -> None:
        for name in self._saved(index):
            self._live.hold(name, ("saved", index))
        if segment.discards_output:
            self._hand_to_later_readers(index, segment, backward_at)

    def _saved(self, index: int) -> Iterator[str]:
        """What a step saves on the device; what it offloads is on its way to the host, and its backward fetches it."""
        step = self._block.steps[index]
        for name in step.saves:
            given_away = name == self._block.input and not self._block.keeps_input  # kept by the longer segment around
            assert self._live[name].holders or given_away, f"{step.name} saves {name}, which is gone"
            if name not in step.offloads:
                yield name

    def _hand_to_later_readers(self, index: int, segment: Segment, backward_at: int) -> None:
        """A recomputed output belongs to the steps after its segment whose backward is still to come."""
        steps = self._block.steps
        for name in steps[index].made:
            for later in range(segment.stop, min(backward_at + 1, len(steps))):
                if name in steps[later].saves:
                    self._live.hold(name, ("saved", later))


def _by_index(last: dict[str, int]) -> dict[int, list[str]]:
    ends: dict[int, list[str]] = {}
    for name, index in last.items():
        ends.setdefault(index, []).append(name)
    return ends
