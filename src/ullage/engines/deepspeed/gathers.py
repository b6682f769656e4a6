"""Which parameters stage 3 holds whole, and when: the parameter coordinator replayed over the blocks of a forward and a backward.

Source: runtime/zero/partitioned_param_coordinator.py (fetch_sub_module, release_sub_module, __params_to_release), from the second
micro-step on, when its trace is complete. A parameter stays whole where its next use is nearer than max_reuse_distance. The prefetcher
queues parameters ahead: where a prefetch bucket is larger than what one module takes, it runs ahead up to max_live_parameters;
else it stays one parameter ahead. A fetch of several parameters is one flat buffer and a copy of each until the last is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from functools import lru_cache

from ullage.engines.base import sized
from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free
from ullage.memory.rank import LocalParam, Rank


def is_persistent(numel: int, knobs: Knobs) -> bool:
    return numel <= knobs.persistence_threshold


def persistent_numel(held: Held, knobs: Knobs) -> int:
    """Elements that stay whole: small parameters, in model order, as long as model_persistence_threshold lasts."""
    total = 0
    for numel in held.numels:
        if is_persistent(numel, knobs) and total + numel <= knobs.model_persistence_threshold:
            total += numel
    return total


@frozen
class _Unit:
    """One element's parameters that are gathered.

    window: held while its modules run one after another, if it is not held whole: the largest module (twice if it has several
    parameters: flat buffer and copies), and the next parameter. In a backward the module after it is not released yet: twice as much.
    """

    numel: int
    window: int
    name: str


@frozen
class Gathers:
    """Moments of a forward and a backward: before use t, ``fetched[t]``; after it, ``released[t]`` (places of elements).

    whole: whether the element of use t is held whole during it, rather than module by module.
    """

    job: Job
    elements: tuple[Element, ...]
    units: tuple[_Unit, ...]
    fetched: tuple[tuple[int, ...], ...]
    released: tuple[tuple[int, ...], ...]
    whole: tuple[bool, ...]
    prefetched_flat: int

    @staticmethod
    def plan(job: Job, rank: Rank, knobs: Knobs, elements: ListLike[Element]) -> Gathers:
        units = tuple(_unit(rank, knobs, element) for element in elements)
        modules = sum(_modules(element, rank, knobs) for element in elements)
        total = sum(unit.numel for unit in units)
        runaway = bool(modules) and knobs.prefetch_bucket > total / modules
        uses = [*range(len(units)), *reversed(range(len(units)))]
        fetched, released, whole = _coordinate(units, uses, knobs, runaway)
        return Gathers(
            job=job,
            elements=tuple(elements),
            units=units,
            fetched=fetched,
            released=released,
            whole=whole,
            prefetched_flat=min(knobs.prefetch_bucket, total) if runaway else 0,
        )

    def forward(self, replayer: Replayer) -> Node:
        rule = GradRule(mode="add")
        nodes = []
        for at, element in enumerate(self.elements):
            inner = chunks.forward([element], replayer, Wrap(), rule)
            nodes.append(Sequence([*self._before(at, at), inner, *self._after(at, at)]))
        return Sequence(nodes)

    def backward(self, replayer: Replayer, first_flush: int, flush: Node) -> Node:
        rule = GradRule(mode="add")
        nodes = []
        count = len(self.elements)
        for place in range(count):
            at, use = count - 1 - place, count + place
            inner = chunks.backward([self.elements[at]], replayer, Wrap(), rule)
            pulse = [flush] if place + 1 >= first_flush else []
            nodes.append(Sequence([*self._before(use, at), inner, *pulse, *self._after(use, at)]))
        return Sequence(nodes)

    def _before(self, use: int, at: int) -> list[Node]:
        """Fetches; the flat buffers of the last fetch go when its parameters have been waited for."""
        nodes = [alloc(self._item(index)) for index in self.fetched[use]]
        if self.fetched[use] and self.prefetched_flat:
            flat = self._flat()
            nodes.append(Sequence([alloc(flat), free(flat)], "parameter gather"))
        if not self.whole[use] and self.units[at].window:
            nodes.append(alloc(self._window(use, at)))
        return nodes

    def _after(self, use: int, at: int) -> list[Node]:
        nodes = [free(self._item(index)) for index in self.released[use]]
        if not self.whole[use] and self.units[at].window:
            nodes.append(free(self._window(use, at)))
        return nodes

    def _item(self, index: int) -> Item:
        unit = self.units[index]
        return _gathered(
            f"gathered parameters of {unit.name}", unit.numel, self.job.precision.params, "", "fetch to release"
        )

    def _window(self, use: int, index: int) -> Item:
        unit = self.units[index]
        backward = use >= len(self.elements)
        why = "the largest module and the parameter ahead" + (", and the module not yet released" if backward else "")
        numel = unit.window * (2 if backward else 1)
        return _gathered(f"gathered modules of {unit.name}", numel, self.job.precision.params, why, "module by module")

    def _flat(self) -> Item:
        return _gathered(
            "flat buffer of a prefetch",
            self.prefetched_flat,
            self.job.precision.params,
            "stage3_prefetch_bucket_size",
            "until its last parameter is waited for",
        )


@lru_cache(maxsize=1024)
def _gathered(what: str, numel: int, dtype: str, why: str, lives: str) -> Item:
    """One object for one line of the ledger, so that a release finds its fetch."""
    return sized("gathered", what, numel, dtype, why=why, lives=lives)


def _coordinate(
    units: tuple[_Unit, ...], uses: list[int], knobs: Knobs, runaway: bool
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    """(fetched, released, whole) of every use."""
    live: set[int] = set()
    fetched: list[tuple[int, ...]] = []
    released: list[tuple[int, ...]] = []
    whole: list[bool] = []
    for use, index in enumerate(uses):
        stays = _next_use_is_near(units, uses, use, knobs.max_reuse_distance)
        wanted = [index] if index not in live and (runaway or stays) else []
        if runaway:
            held = sum(units[one].numel for one in live | set(wanted))
            for ahead in uses[use + 1 :]:
                if ahead in live or ahead in wanted:
                    continue
                if held >= knobs.max_live:
                    break
                wanted.append(ahead)
                held += units[ahead].numel
        live |= set(wanted)
        whole.append(index in live)
        gone = [index] if index in live and not stays else []
        live -= set(gone)
        fetched.append(tuple(one for one in wanted if units[one].numel))
        released.append(tuple(one for one in gone if units[one].numel))
    return tuple(fetched), tuple(released), tuple(whole)


def _next_use_is_near(units: tuple[_Unit, ...], uses: list[int], use: int, distance: int) -> bool:
    traversed = 0
    for later in range(use + 1, len(uses)):
        if traversed >= distance:
            return False
        if uses[later] == uses[use]:
            return True
        traversed += units[uses[later]].numel
    return False


def _gathered_ops(element: Element, rank: Rank, knobs: Knobs) -> list[list[int]]:
    """Elements of each parameter that is gathered, by op."""
    by_name: dict[str, LocalParam] = {param.name: param for param in rank.params}
    found = []
    for op in element.block.ops:
        mine = [by_name.get(f"{element.block.name}.{param.name}") for param in op.params if not param.buffer]
        sizes = [one.numel for one in mine if one is not None and not is_persistent(one.numel, knobs)]
        if sizes:
            found.append(sizes)
    return found


def _modules(element: Element, rank: Rank, knobs: Knobs) -> int:
    return len(_gathered_ops(element, rank, knobs)) * element.size


def _unit(rank: Rank, knobs: Knobs, element: Element) -> _Unit:
    ops = _gathered_ops(element, rank, knobs)
    numel = sum(sum(sizes) for sizes in ops) * element.size
    module = max((sum(sizes) * (2 if len(sizes) > 1 else 1) for sizes in ops), default=0)
    ahead = max((max(sizes) for sizes in ops), default=0)
    return _Unit(
        numel=numel,
        window=module + ahead,
        name=element.block.name,
    )
