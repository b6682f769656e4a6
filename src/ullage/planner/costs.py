"""What one block costs one rank under a grid, a choice of the degrees that divide it (tensor, sequence, context, expert parallelism) with a
loss: seconds, and bytes that a forward leaves for the backward, of any number of sequences.

A grid with a micro-batch is a shape (shapes.py). How many blocks a rank has, how often it runs them and what is divided over replicas is
arithmetic on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TypeVar

from ullage.engines.base import context_of
from ullage.engines.reach import offloads_activations
from ullage.frozen import replace
from ullage.job.bind import is_expert, local_numel
from ullage.job.job import Job, Recompute
from ullage.kernels import stacks
from ullage.kernels.lowering import of_loss
from ullage.kernels.step import Context
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import CHECKPOINT, PLAIN, SELECTIVE, Replayer, stream_bytes
from ullage.memory.left import left_bytes
from ullage.memory.rank import Chunk
from ullage.model.graph import ROUTED, Block, Graph, Param, Run
from ullage.planner.growing import Growing, LookedUp, Pair, Sizes
from ullage.planner.knapsack import Groups
from ullage.planner.space import NONE
from ullage.planner.states import frozen_bytes
from ullage.timing import states
from ullage.timing.again import passes_again
from ullage.timing.blocks import Place
from ullage.timing.machine import axis_group, exchange_cost
from ullage.timing.ops import block_work, dense_work, experts_work
from ullage.timing.stage import place_of, sends
from ullage.timing.work import Exchange, OpWork, Pass

Both = tuple[Growing, Growing]
Numels = tuple[int, int, float]
"""Elements of parameters that are trained, dense ones and experts', and bytes of frozen ones, whole (states.py, frozen_bytes)."""
ExpertsSeconds = dict[object, dict[int, list[float]]]
"""Of each kind of block seconds of its experts: by who sends to whom, then by rows that are sent."""
Work = Callable[[Block, Context, bool], tuple[OpWork, ...]]

_RULE = GradRule(mode="add")

Answer = TypeVar("Answer")
Worked = TypeVar("Worked", OpWork, Pass)


class GridCosts:
    """The kinds of block of a graph under one grid, for one sequence and for two.

    experts_s: what all grids of the graph know of their experts. sizes: micro-batches that may be asked for.
    like: the same grid with another loss; the blocks without one are its. beside: the same tensor, sequence and context parallelism and the
    same loss with other expert parallelism: the blocks without experts are its, and of the others the ops that are the same.
    """

    def __init__(
        self,
        job: Job,
        graph: Graph,
        like: GridCosts | None = None,
        beside: GridCosts | None = None,
        experts_s: ExpertsSeconds | None = None,
        sizes: Sizes = (),
    ) -> None:
        self.job, self.graph = job, graph
        self._sizes = sizes
        self._experts_s: ExpertsSeconds = {} if experts_s is None else experts_s
        self.like, self._beside = like, beside
        self.kinds = kinds(graph)
        self.is_layer = [block.role == "layer" for block in self.kinds]
        self.runs = [(self.kinds.index(run.block), run.repeat, run.block.role) for run in graph.runs]
        self._expert_kinds = _expert_kinds(graph)
        self._has_experts = any(self._expert_kinds)
        self._kept: dict[tuple[int, str, tuple[str, ...]], tuple[int, int]] = {}
        self._again: dict[tuple[int, str, tuple[str, ...]], Growing] = {}
        self._looked_up: LookedUp = {} if like is None else like._looked_up
        self._dense_works: dict[int, Both] = {}
        self._dense_s: dict[int, list[float]] = {}
        self._sends: dict[tuple[int, int], Growing] = {}
        self._wire: dict[object, list[tuple[float, float]]] = {}
        self._asked: dict[object, object] = {}

    @cached_property
    def contexts(self) -> tuple[Context, Context]:
        one, two = (
            context_of(replace(self.job, data=replace(self.job.data, micro_batch=number)), self.graph)
            for number in (1, 2)
        )
        return one, two

    @cached_property
    def place(self) -> Place:
        return place_of(self.job, self.contexts[0])

    @cached_property
    def numels(self) -> list[Numels]:
        """Of each kind, of its parameters on one rank."""
        return [self._numels(block) for block in self.kinds]

    @cached_property
    def groups(self) -> Groups:
        """What its layers can recompute piece by piece, whatever the micro-batch."""
        layers = [block for block in self.kinds if block.role == "layer"]
        return Groups(self, stacks.recomputable(layers, self.contexts[0]))

    @cached_property
    def works(self) -> list[Both]:
        """Of each kind, its forward and its backward."""
        return [self._grown(block_work, kind, lambda of, kind: of.works[kind]) for kind in range(len(self.kinds))]

    def _dense(self, kind: int) -> Both:
        """What is the same under any expert parallelism, and known without lowering."""
        if kind not in self._dense_works:
            self._dense_works[kind] = self._grown(dense_work, kind, GridCosts._dense)
        return self._dense_works[kind]

    @cached_property
    def _experts(self) -> list[list[Growing]]:
        """What is not the same, likewise, forward and backward, if there is any."""
        found = []
        for block in self.kinds:
            pairs = self._pairs(experts_work, block)
            each = (False, True) if pairs[0] else ()
            found.append([self._growing(pairs[backward], backward=backward) for backward in each])
        return found

    def least_s(self, micro_batch: int) -> float:
        """All blocks, forward and backward: no less than their matmuls, attention and exchanges."""
        return self.dense_s(micro_batch) + self.experts_s(micro_batch)

    def least_layer_s(self, micro_batch: int) -> float:
        """The shortest layer, likewise."""
        dense, experts = self._each_dense_s(micro_batch), self._each_experts_s(micro_batch)
        return min([a + b for a, b, layer in zip(dense, experts, self.is_layer, strict=True) if layer])

    def experts_s(self, micro_batch: int) -> float:
        """All experts and what is sent to them, likewise."""
        return self._of_all(self._each_experts_s(micro_batch))

    def _of_all(self, each: list[float]) -> float:
        return sum([times * each[kind] for kind, times, _ in self.runs])

    def _each_experts_s(self, micro_batch: int) -> list[float]:
        if not self._has_experts:
            return [0.0] * len(self.kinds)
        rows, known = self._routed
        found = known.get(rows * micro_batch)
        if found is None:
            found = [sum([one.seconds(micro_batch) for one in both]) for both in self._experts]
            known[rows * micro_batch] = found
        return found

    @cached_property
    def _routed(self) -> tuple[int, dict[int, list[float]]]:
        """Rows of one sequence that are sent to experts, and what is known of experts by rows, of grids with as many ranks that send
        as far. Where experts do not share them evenly, only of as many for each sequence, since rows of each then do not grow evenly
        (growing.py)."""
        layout = self.job.layout
        rows, experts = (self.contexts[0].size(dim) for dim in (ROUTED, "experts"))
        uneven = 0 if rows % experts == 0 else rows
        sent_to = axis_group(self.job.cluster, layout, "ep"), layout.ep, layout.etp, uneven
        return rows, self._experts_s.setdefault(sent_to, {})

    def layers_s(self, micro_batch: int) -> float:
        """The layers of the kind that there are most of without their experts, likewise."""
        kind, times = self._layers
        return times * sum([one.seconds(micro_batch) for one in self._dense(kind)])

    @cached_property
    def _layers(self) -> tuple[int, int]:
        """The kind of layer that there are most of, and how many."""
        counts: Counter[int] = Counter()
        for kind, times, role in self.runs:
            counts[kind] += times if role == "layer" else 0
        return counts.most_common(1)[0]

    def dense_s(self, micro_batch: int) -> float:
        """All blocks without their experts, likewise."""
        return self._of_all(self._each_dense_s(micro_batch))

    def _each_dense_s(self, micro_batch: int) -> list[float]:
        """Computed once for all expert parallelism."""
        if self._beside is not None:
            return self._beside._each_dense_s(micro_batch)
        if micro_batch not in self._dense_s:
            self._dense_s[micro_batch] = [
                sum([one.seconds(micro_batch) for one in self._dense(kind)]) for kind in range(len(self.kinds))
            ]
        return self._dense_s[micro_batch]

    def known(self, key: object, ask: Callable[[], Answer]) -> Answer:
        """What is asked of the grid once for each key."""
        if key not in self._asked:
            self._asked[key] = ask()
        return self._asked[key]  # type: ignore[return-value]

    def send_s(self, job: Job) -> float:
        """Seconds in which a pipeline stage's output is sent on."""
        layout = job.layout
        key = layout.dp, layout.pp
        if key not in self._sends:
            one, two = (Pass(exchanges=sends(job, context)) for context in self.contexts)
            self._sends[key] = Growing(
                [(one, two)], replace(self.place, layout=layout), {}, backward=False, sizes=self._sizes
            )
        return self._sends[key].seconds(job.data.micro_batch)

    @cached_property
    def sent_bytes(self) -> tuple[int, int]:
        """A layer's output, which a pipeline rank sends on: of one sequence, and what each sequence more adds."""
        layer = next(block for block in self.kinds if block.role == "layer")
        one, two = (stream_bytes(layer.output, context) for context in self.contexts)
        return one, two - one

    def wire_s(self, job: Job) -> list[tuple[float, float]]:
        """Of each kind of block, seconds in which its parameters are gathered and its gradients reduced, by themselves."""
        layout, engine = job.layout, job.engine
        key = (engine.name, engine.zero_stage, engine.shard_group, layout.dp, layout.pp > 1)
        if key not in self._wire:
            self._wire[key] = [
                (
                    _sent_s(job, states.gathers(job, self.graph, block)),
                    _sent_s(job, states.reduced(job, self.graph, block)),
                )
                for block in self.kinds
            ]
        return self._wire[key]

    def _grown(self, work: Work, kind: int, of: Callable[[GridCosts, int], Both]) -> Both:
        """of: the same of another grid."""
        known = self._known[kind]
        if known is not None:
            return of(known, kind)
        beside = of(self._beside, kind) if self._beside is not None else (None, None)
        forward, backward = self._pairs(work, self.kinds[kind])
        return (
            self._growing(forward, backward=False, beside=beside[0]),
            self._growing(backward, backward=True, beside=beside[1]),
        )

    def _growing(self, pairs: list[Pair], *, backward: bool, beside: Growing | None = None) -> Growing:
        return Growing(pairs, self.place, self._looked_up, backward=backward, beside=beside, sizes=self._sizes)

    def _pairs(self, work: Work, block: Block) -> tuple[list[Pair], list[Pair]]:
        """A block's passes for one sequence and for two, forward and backward."""
        one, two = (work(block, context, self.place.accumulates) for context in self.contexts)
        pairs = _paired(*([(each.name, each) for each in works] for works in (one, two)))
        return [(a.forward, b.forward) for a, b in pairs], [(a.backward, b.backward) for a, b in pairs]

    @cached_property
    def _known(self) -> list[GridCosts | None]:
        """Of each kind the grid whose block it is too."""
        return [
            self.like if self.like is not None and not _has_loss(block) else None if experts else self._beside
            for block, experts in zip(self.kinds, self._expert_kinds, strict=True)
        ]

    @cached_property
    def own_kinds(self) -> list[int]:
        """Kinds that another loss changes."""
        return [kind for kind, block in enumerate(self.kinds) if self.like is None or _has_loss(block)]

    def _numels(self, block: Block) -> Numels:
        again = self.graph.again()
        return self._summed(
            param for param in block.params if not param.buffer and f"{block.name}.{param.name}" not in again
        )

    def _summed(self, params: Iterable[Param]) -> Numels:
        dense = experts = 0
        frozen = 0.0
        for param in params:
            numel = self._numel(param)
            if not param.trainable:
                frozen += frozen_bytes(self.job, param, numel)
            elif is_expert(param):
                experts += numel
            else:
                dense += numel
        return dense, experts, frozen

    def _numel(self, param: Param) -> int:
        return local_numel(self.graph, param, self.job.layout)

    @cached_property
    def tied(self) -> Numels:
        """What the first and the last rank share where they are one."""
        seconds = {second for _, second in self.graph.tied} - self.graph.again()
        return self._summed(
            param for block in self.kinds for param in block.params if f"{block.name}.{param.name}" in seconds
        )

    def again(self, kind: int, recompute: Recompute) -> Growing:
        """What the backward of a block of this kind runs again under a selection or a checkpoint that is not the whole forward."""
        known = self._known[kind]
        if known is not None:
            return known.again(kind, recompute)
        key = (kind, recompute.kind, recompute.modules)
        if key not in self._again:
            block = self.kinds[kind]
            chosen = CHECKPOINT if recompute.kind == "full" else SELECTIVE
            mode = chosen if block.role == "layer" else PLAIN
            stop = self.place.early_stop
            passes = (passes_again(block, context, mode, recompute, early_stop=stop) for context in self.contexts)
            self._again[key] = self._growing(_paired(*passes), backward=False)
        return self._again[key]

    def head_bytes(self, micro_batch: int) -> int:
        """What a forward of the head and the loss leaves behind: one rank has them, whatever the pipeline."""
        heads = [(kind, times) for kind, times, role in self.runs if role in ("head", "loss")]
        return sum([times * self.kept_bytes(kind, NONE, micro_batch) for kind, times in heads])

    def kept_bytes(self, kind: int, recompute: Recompute, micro_batch: int) -> int:
        """What one more block of this kind in a chunk leaves behind after a forward: at least nothing."""
        first, each = self.kept(kind, recompute)
        return max(0, first + each * (micro_batch - 1))

    def kept(self, kind: int, recompute: Recompute) -> tuple[int, int]:
        """The same of one sequence, and what each sequence more adds. Of layers whose activations go to the host, nothing is sure to be on
        the device."""
        if self.is_layer[kind] and offloads_activations(self.job):
            return 0, 0
        known = self._known[kind]
        if known is not None:
            return known.kept(kind, recompute)
        key = (kind, recompute.kind, recompute.modules)
        if key not in self._kept:
            one, two = (_kept_bytes(self.kinds[kind], context, recompute) for context in self.contexts)
            # copies that one sequence does not need: from two on bytes grow by a half of those of two
            self._kept[key] = (one, min(two - one, two // 2) if two > 2 * one else two - one)
        return self._kept[key]


def _has_loss(block: Block) -> bool:
    return any(map(of_loss, block.ops))


def _sent_s(job: Job, exchanges: tuple[Exchange, ...]) -> float:
    return sum(exchange_cost(job, one).seconds for one in exchanges)


def _paired(one: Sequence[tuple[str, Worked]], two: Sequence[tuple[str, Worked]]) -> list[tuple[Worked, Worked]]:
    """What one sequence and two have in common, by name. What only one of them has takes no time here: rows that an 8-bit matmul pads,
    which two sequences may fill."""
    if len(one) != len(two):
        both = Counter(name for name, _ in one) & Counter(name for name, _ in two)
        one, two = _among(both, one), _among(both, two)
    return list(zip((each for _, each in one), (each for _, each in two), strict=True))


def _among(names: Counter[str], works: Sequence[tuple[str, Worked]]) -> list[tuple[str, Worked]]:
    left = names.copy()
    found = []
    for name, work in works:
        if left[name] > 0:
            left[name] -= 1
            found.append((name, work))
    return found


def _kept_bytes(block: Block, context: Context, recompute: Recompute) -> int:
    found = left_bytes(block, context, recompute)
    return _kept_by(block, context, recompute) if found is None else found


def _kept_by(block: Block, context: Context, recompute: Recompute) -> int:
    if block.role != "layer":
        return _left_by(block, 1, context, recompute)
    return _left_by(block, 2, context, recompute) - _left_by(block, 1, context, recompute)


def _left_by(block: Block, times: int, context: Context, recompute: Recompute) -> int:
    replayer = Replayer(context=context, recompute=recompute)
    part = Chunk(runs=(Run(block=block, repeat=times),), first=False, last=False)
    return chunks.forward(replayer.elements(part), replayer, chunks.Wrap(), _RULE).delta_bytes


@lru_cache(maxsize=64)
def kinds(graph: Graph) -> tuple[Block, ...]:
    """The different blocks of a graph."""
    return tuple(dict.fromkeys(run.block for run in graph.runs))


@lru_cache(maxsize=64)
def _expert_kinds(graph: Graph) -> tuple[bool, ...]:
    """Of each kind of block whether it has experts."""
    return tuple(any(map(is_expert, block.params)) for block in kinds(graph))
