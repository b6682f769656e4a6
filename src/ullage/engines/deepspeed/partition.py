"""Which parameters one rank holds, in the order in which DeepSpeed flattens them, and whose each slice is."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as ListLike
from functools import lru_cache

from ullage.engines.quantised import held as packed
from ullage.frozen import frozen
from ullage.job.adapted import QUANTISED, graph_of
from ullage.job.job import Job
from ullage.memory.chunk import Element
from ullage.memory.program import Item, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import Block

ALIGNMENT = 2
"""Elements to which a flat group's partitions are aligned (nccl_start_alignment_factor, zero/stage_1_and_2.py)."""


@frozen
class Own:
    """What one data-parallel rank owns of a flat group. whole: elements of every parameter that its partition touches;
    largest_slice: of one parameter; first, last: places of these parameters in the group."""

    whole: int
    largest_slice: int
    first: int
    last: int


@frozen
class Flat:
    """A flat group: its parameters' elements in model order, over ``shards`` ranks.

    round_robin: it is laid out by turns, every ``shards``-th parameter together (round_robin_gradients).
    """

    numels: tuple[int, ...]
    shards: int
    round_robin: bool = False

    @property
    def layout(self) -> tuple[int, ...]:
        """Places of the parameters in the order in which they are flattened."""
        places = range(len(self.numels))
        if not self.round_robin:
            return tuple(places)
        return tuple(place for turn in range(self.shards) for place in places[turn :: self.shards])

    @property
    def total(self) -> int:
        return sum(self.numels)

    @property
    def padded(self) -> int:
        return round_up(self.total, ALIGNMENT * self.shards) if self.total else 0

    @property
    def partition(self) -> int:
        return self.padded // self.shards

    @property
    def largest(self) -> int:
        return max(self.numels, default=0)

    def own(self, index: int) -> Own:
        return _own(self, index)

    def owners(self, place: int) -> tuple[int, int]:
        """The first and the last rank that own a slice of the parameter at ``place``."""
        return _owners(self)[place]


@lru_cache(maxsize=4096)
def _own(flat: Flat, index: int) -> Own:
    start, stop = index * flat.partition, (index + 1) * flat.partition
    at = whole = largest = 0
    first, last = len(flat.numels), -1
    for place in flat.layout:
        numel = flat.numels[place]
        mine = min(stop, at + numel) - max(start, at)
        if mine > 0:
            whole += numel
            largest = max(largest, mine)
            first, last = min(first, place), place
        at += numel
    return Own(whole=whole, largest_slice=largest, first=first, last=last)


@lru_cache(maxsize=512)
def _owners(flat: Flat) -> tuple[tuple[int, int], ...]:
    found = [(0, 0)] * len(flat.numels)
    at = 0
    for place in flat.layout:
        end = at + flat.numels[place]
        found[place] = (at // flat.partition, max(at, end - 1) // flat.partition)
        at = end
    return tuple(found)


@frozen
class Held:
    """All parameters of a pipeline rank: trainable ones by block (dense and expert apart), and the elements of each frozen one.

    quantised: frozen ones that bitsandbytes packs. They are no floating numbers, which the wrapper casts, nor has it groups of them.
    """

    dense: Flat
    expert: Flat
    frozen_numels: tuple[int, ...]
    quantised: tuple[Item, ...] = ()

    @property
    def flats(self) -> tuple[tuple[str, Flat], ...]:
        both = (("dense", self.dense), ("experts", self.expert))
        return tuple((name, flat) for name, flat in both if flat.numels)

    @property
    def frozen(self) -> int:
        return sum(self.frozen_numels)

    @property
    def trainable(self) -> int:
        return self.dense.total + self.expert.total

    @property
    def partition(self) -> int:
        return self.dense.partition + self.expert.partition

    @property
    def numels(self) -> tuple[int, ...]:
        return self.dense.numels + self.expert.numels

    def spans_owners(self, places: Iterable[int]) -> bool:
        """Whether the gradients at these places (of all in model order) are more than one rank's. With experts: whether they may be."""
        if self.expert.numels:
            return max(self.dense.shards, self.expert.shards) > 1
        owners = {owner for place in places for owner in self.dense.owners(place)}
        return len(owners) > 1


@lru_cache(maxsize=512)
def held(job: Job, rank: Rank) -> Held:
    by_name = {param.name: param for param in rank.params}
    dense: list[int] = []
    expert: list[int] = []
    frozen: list[int] = []
    for chunk in rank.chunks:
        for run in chunk.runs:
            mine = [by_name.get(f"{run.block.name}.{param.name}") for param in run.block.params]
            here = [param for param in mine if param is not None]
            dense += [one.numel for one in here if not one.expert and one.param.trainable] * run.repeat
            expert += [one.numel for one in here if one.expert and one.param.trainable] * run.repeat
            whole = [one for one in here if not one.param.trainable and one.param.elements not in QUANTISED]
            frozen += [one.numel for one in whole] * run.repeat
    narrow = [one for one in rank.params if one.param.elements in QUANTISED]
    by_turns = job.engine.zero_stage < 3 and job.engine.options.get("round_robin_gradients") is True
    return Held(
        dense=Flat(numels=tuple(dense), shards=data_parallel(job), round_robin=by_turns),
        expert=Flat(numels=tuple(expert), shards=job.layout.expert_dp, round_robin=by_turns),
        frozen_numels=tuple(frozen),
        quantised=tuple(packed(narrow, graph_of(job))) if narrow else (),
    )


def data_parallel(job: Job) -> int:
    """Ranks over which states are divided: data parallel and sequence (context) parallel together."""
    return job.layout.dp * job.layout.cp


def gradients_of(block: Block, params: ListLike[tuple[str, int]], grads: Container[str]) -> dict[str, tuple[int, int]]:
    """Of a block's gradients by name, their places among its parameters and their elements: that of matmuls fused into one weight
    (GPT-2's c_attn) stands where the first of them does."""
    fused = {
        param.name: f"{op.attrs['group']}.{param.name.rpartition('.')[2]}"
        for op in block.ops
        if op.attrs.get("group")
        for param in op.params
    }
    found: dict[str, tuple[int, int]] = {}
    for place, (name, numel) in enumerate(params):
        name = name if name in grads else fused.get(name, name)
        first, before = found.get(name, (place, 0))
        found[name] = first, before + numel
    return found


def element_params(job: Job, rank: Rank, elements: ListLike[Element]) -> list[tuple[tuple[str, int], ...]]:
    """Name and elements of each trainable parameter of each element (a few blocks checkpointed as one), in model order."""
    by_name = {param.name: param for param in rank.params}
    found = []
    for element in elements:
        here = [(param.name, by_name.get(f"{element.block.name}.{param.name}")) for param in element.block.params]
        mine = tuple((name, one.numel) for name, one in here if one is not None and one.param.trainable)
        found.append(mine * element.size)
    return found
