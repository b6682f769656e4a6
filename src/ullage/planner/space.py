"""Every strategy that a request leaves open, as nested choices, and how many they are. What contradicts itself is for job/checks.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, combinations, product
from math import isqrt

from ullage.engines.base import context_of
from ullage.errors import Unsupported
from ullage.frozen import frozen, replace
from ullage.job.engine import OF_TRANSFORMERS, STAGES
from ullage.job.job import Data, Job, Layout, Loss, Recompute, ScheduleName
from ullage.kernels import stacks
from ullage.kernels.stacks import Modules
from ullage.model.graph import Graph
from ullage.planner.wanted import Base, Wanted

Split = tuple[int, ...] | None
"""Layers of each rank; None: all have as many."""

NONE, FULL, SELECTIVE = Recompute(), Recompute(kind="full"), Recompute(kind="selective")

_SHARD_GROUPS = ("fsdp1", "fsdp2")
_OWN_LOSSES = {
    "liger": ("full", "fused-linear"),
    "megatron": ("vocab-parallel", "vocab-parallel-fused"),
    "torchtitan": ("full", "vocab-parallel"),
}
"""Loss kinds by stack, where there is more than its own whole one."""

PLANNED: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved-1f1b")
"""Schedules of which the bounds hold: a micro-batch is in flight until its whole backward is done."""

MOST_SEQUENCES = 4096
"""Of a micro-batch, where no batch limits it."""

_SAY_STAGE = (
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "sharding_strategy",
    "reshard_after_forward",
)
"""Options in which an engine says its stage in words of its own (job/engine.py, default_stage)."""


@frozen
class Family:
    """Recomputations of one kind: of layers one by one, from none to all, each slower and smaller than the one before; or sets of
    modules.
    """

    kinds: tuple[Recompute, ...]

    @property
    def layered(self) -> bool:
        return len(self.kinds) > 1 and self.kinds[0] == NONE

    @property
    def modular(self) -> bool:
        """Whether one is to be chosen by what a layer's modules free (knapsack.py)."""
        return len(self.kinds) > 1 and not self.layered

    @property
    def fastest(self) -> Recompute:
        """None of them takes less time."""
        return NONE if self.modular else self.kinds[0]

    def at_least(self, layers: int) -> Recompute:
        """The first that runs so many layers again, or the last."""
        return self.kinds[min(layers, len(self.kinds) - 1)]


class Space:
    """The strategies of a request. Each choice takes a job with those before it made, and yields jobs with one more.

    A count is of strategies with the cut in place of the best one, which is found later, counted as an even one.
    """

    def __init__(self, want: Wanted) -> None:
        self.want = want
        self._counted: dict[object, dict[int, int]] = {}
        self._families: dict[object, tuple[int, ...]] = {}
        self._cuts: dict[object, tuple[int, ...]] = {}
        self._waits: dict[object, float] = {}

    # -- choices

    def grids(self, base: Base) -> Iterator[list[Job]]:
        """Degrees that divide blocks, with each loss. Of what is still open each has the least, so that a goal makes the least of it."""
        want, gpus = self.want, base.job.cluster.gpus
        stages = self._stages(base, gpus)
        if not stages:
            return
        engine = replace(base.job.engine, zero_stage=min(stages))
        experts = _experts(base)
        for tp in self._tensor_parallel(base):
            if gpus % tp:
                continue
            for cp in self._degrees("cp", gpus // tp):
                for etp in self._degrees("etp", tp) if experts else (1,):
                    for ep in self._degrees("ep", experts or 1):
                        for sp in self._sequence_parallel(base, tp):
                            kind, dp = base.job.layout.cp_kind, gpus // (tp * cp) or 1
                            layout = Layout(dp=dp, tp=tp, cp=cp, cp_kind=kind, sp=sp, ep=ep, etp=etp)
                            job = replace(base.job, layout=layout, engine=engine)
                            yield [replace(job, loss=loss) for loss in _losses(want, base)]

    def shapes(self, base: Base, grid: Job) -> list[Job]:
        """A grid with each micro-batch that divides the batch."""
        return [_with_micro_batch(grid, size) for size in self.sizes(base, grid)]

    def pipelines(self, base: Base, shape: Job) -> Iterator[Job]:
        """A shape over pipeline ranks, with its replicas and micro-batches."""
        for pp, dp, data in self._pipes(base, shape):
            yield replace(shape, layout=replace(shape.layout, dp=dp, pp=pp), data=data)

    def _pipes(self, base: Base, shape: Job) -> Iterator[tuple[int, int, Data]]:
        """Pipeline ranks, replicas, micro-batches."""
        ranks = shape.cluster.gpus // (shape.layout.tp * shape.layout.cp)
        for pp in self._degrees("pp", ranks):
            if ranks % pp or pp > base.graph.layers or self.want.fixed("dp") not in (None, ranks // pp):
                continue
            data = self._data(shape.data, ranks // pp)
            if data is not None:
                yield pp, ranks // pp, data

    def waits(self, base: Base, shape: Job) -> float:
        """Of a shape's pipelines the fewest layers that a mean rank waits for before its first, for each micro-batch of the step: a rank
        has one at least before each after it (bounds.py, evenly_bound_s)."""
        key = id(base), shape.layout.tp * shape.layout.cp, shape.layout.cp, shape.data.micro_batch
        if key not in self._waits:
            pipes = self._pipes(base, shape)
            self._waits[key] = min([(pp - 1) / (2 * data.grad_accum * dp) for pp, dp, data in pipes], default=0.0)
        return self._waits[key]

    def cuts(self, base: Base, pipeline: Job, best: Split) -> list[Job]:
        """Layers over its ranks: as the job says, or evenly where that comes out, and in the best way where it is another."""
        return [_with_split(pipeline, split) for split in self._splits(base, pipeline.layout.pp, best)]

    def has_best_cut(self, pipeline: Job) -> bool:
        """Whether the cut is open."""
        return pipeline.layout.pp > 1 and "layout.pp_split" not in self.want.written

    def chunked(self, base: Base, cut: Job) -> Iterator[Job]:
        """Model chunks per rank: as many as divide an inner rank's layers, so that no rank waits for another's longer chunk."""
        for vpp, schedule in self._chunks(base, cut):
            yield replace(cut, layout=replace(cut.layout, vpp=vpp, schedule=schedule))

    def _chunks(self, base: Base, cut: Job) -> Iterator[tuple[int, ScheduleName]]:
        layout = cut.layout
        split = layout.pp_split
        inner = max(split[1:-1] or split) if split else base.graph.layers // layout.pp
        fewest = min(split) if split else inner
        for vpp in self._degrees("vpp", inner):
            schedule = self._schedule(layout.pp, vpp)
            if schedule is not None and vpp <= fewest and (vpp == 1 or self.interleaves(cut)):
                yield vpp, schedule

    def interleaves(self, pipeline: Job) -> bool:
        """Whether a rank may have several chunks, which take turns after as many micro-batches as there are ranks."""
        return pipeline.layout.pp > 1 and pipeline.data.grad_accum % pipeline.layout.pp == 0

    def most_chunks(self, base: Base, cut: Job) -> int:
        """Of a rank."""
        return max((vpp for vpp, _ in self._chunks(base, cut)), default=1)

    def engines(self, base: Base, cut: Job) -> tuple[Job, ...]:
        """Stages and shard groups."""
        return tuple(
            replace(cut, engine=replace(base.job.engine, zero_stage=stage, shard_group=shards))
            for stage, shards in self._divisions(base, cut)
        )

    def families(self, base: Base, cut: Job) -> tuple[Family, ...]:
        """Recomputation layer by layer and, where the stack has them, of modules or its own selection; or what the job says."""
        if "recompute" in self.want.written:
            return (Family(kinds=(base.job.recompute,)),)
        return (layer_by_layer(_largest_chunk(base, cut)), *_selections(base.job, base.graph))

    # -- how many

    def count(self, base: Base, shape: Job) -> int:
        """Strategies of a shape."""
        return self.sizes(base, shape)[shape.data.micro_batch]

    def count_pipeline(self, base: Base, pipeline: Job) -> int:
        """Strategies of a pipeline."""
        return len(self._divisions(base, pipeline)) * sum(self.count_families(base, pipeline))

    def count_families(self, base: Base, pipeline: Job) -> tuple[int, ...]:
        """Of each family, the strategies of a pipeline under one engine."""
        pp = pipeline.layout.pp
        key = id(base), pp, pipeline.data.grad_accum % pp
        if key not in self._families:
            cuts = self.cuts(base, pipeline, (-(-base.graph.layers // pp),) * pp)
            self._families[key] = self.count_cuts(base, pipeline, cuts)
        return self._families[key]

    def count_cuts(self, base: Base, pipeline: Job, cuts: list[Job]) -> tuple[int, ...]:
        """The same of a pipeline that is cut in these ways."""
        pp, splits = pipeline.layout.pp, tuple([one.layout.pp_split for one in cuts])
        key = id(base), pp, pipeline.data.grad_accum % pp, splits
        if key not in self._cuts:
            chunked = [(one, self.families(base, cut)) for cut in cuts for one in self.chunked(base, cut)]
            self._cuts[key] = tuple(
                sum(self.count_family(base, one, each[at]) for one, each in chunked)
                for at in range(len(self.families(base, pipeline)))
            )
        return self._cuts[key]

    def count_family(self, base: Base, chunked: Job, family: Family) -> int:
        """Recomputations of a family, as the longest chunk has layers."""
        return _largest_chunk(base, chunked) + 1 if family.layered else len(family.kinds)

    def sizes(self, base: Base, grid: Job) -> dict[int, int]:
        """A grid's micro-batches, each with its strategies: the same of all that leave as many ranks to pipelines and replicas."""
        layout = grid.layout
        key = (id(base), layout.tp * layout.cp, layout.cp)
        if key not in self._counted:
            want = self.want
            sizes = (want.micro_batch,) if want.micro_batch else _micro_batches(want.global_batch)
            counted = {
                size: sum(self.count_pipeline(base, one) for one in self.pipelines(base, _with_micro_batch(grid, size)))
                for size in sizes
            }
            self._counted[key] = {size: strategies for size, strategies in counted.items() if strategies}
        return self._counted[key]

    # -- what one key may be

    def _tensor_parallel(self, base: Base) -> tuple[int, ...]:
        """Within a node, unless the job says more."""
        own = self.want.fixed("tp")
        return (own,) if isinstance(own, int) else divisors(base.job.cluster.scale_up_gpus)

    def _degrees(self, name: str, number: int) -> tuple[int, ...]:
        """What an axis may be: its fixed degree, or all divisors of ``number``."""
        own = self.want.fixed(name)
        if isinstance(own, int):
            return (own,)
        return (1,) if name == "vpp" and self.want.smallest else divisors(number)

    def _sequence_parallel(self, base: Base, tp: int) -> tuple[bool, ...]:
        own = self.want.fixed("sp")
        if isinstance(own, bool):
            return (own,)
        offered = tp > 1 and base.job.stack not in OF_TRANSFORMERS  # in whose code ullage train alone runs it
        return (False, True) if offered else (False,)

    def _schedule(self, pp: int, vpp: int) -> ScheduleName | None:
        """What runs ``vpp`` chunks a rank; None: nothing that the job allows.

        GPipe keeps more than 1F1B does and is no faster, so it is taken where the job says it.
        """
        natural: ScheduleName = "interleaved-1f1b" if vpp > 1 else "1f1b"
        own = self.want.layout.schedule
        if own not in PLANNED:
            raise Unsupported(
                "is estimated as it is written, and not planned yet",
                key="layout.schedule",
                value=own,
                allowed=", ".join(PLANNED),
            )
        if "layout.schedule" not in self.want.written:
            return natural if vpp == 1 or pp > 1 else None
        if pp == 1:
            return natural if own == natural == "1f1b" else None
        return None if {own, natural} == {"1f1b", "interleaved-1f1b"} else own

    def _splits(self, base: Base, pp: int, best: Split) -> list[Split]:
        if "layout.pp_split" in self.want.written:
            return [self.want.layout.pp_split]
        even: list[Split] = [None] if base.graph.layers % pp == 0 else []
        if pp == 1:
            return even
        splits = [*even, *([best] if best is not None else []), *_around(base.graph.layers, pp)]
        return list(dict.fromkeys(splits))

    def _data(self, data: Data, dp: int) -> Data | None:
        want = self.want
        if want.global_batch is None:
            return replace(data, grad_accum=want.grad_accum or 1)
        if want.global_batch % (dp * data.micro_batch):
            return None
        accum = want.global_batch // (dp * data.micro_batch)
        return replace(data, grad_accum=accum) if want.grad_accum in (None, accum) else None

    def _divisions(self, base: Base, pipeline: Job) -> list[tuple[int, int | None]]:
        """Stages and shard groups."""
        group = pipeline.layout.dp * pipeline.layout.cp
        return list(product(self._stages(base, group), self._shard_groups(base, group)))

    def _stages(self, base: Base, group: int) -> tuple[int, ...]:
        """ZeRO stages over ``group`` ranks; none where the engine has none that the job can run under."""
        own = base.job.engine
        if "engine.zero_stage" in self.want.written or any(name in own.options for name in _SAY_STAGE):
            return (own.zero_stage,)
        if base.job.offload.optimizer != "none":  # only a sharded optimizer is left on the host, be it on one rank
            return tuple(stage for stage in STAGES[own.name] if stage)
        return STAGES[own.name] if group > 1 else STAGES[own.name][:1]

    def _shard_groups(self, base: Base, group: int) -> tuple[int | None, ...]:
        """All ranks, or a divisor of them: a replica of the shards on each group (HSDP)."""
        own = base.job.engine
        if self.want.smallest or "engine.shard_group" in self.want.written or own.name not in _SHARD_GROUPS:
            return (own.shard_group,)
        return (None, *(one for one in divisors(group) if 1 < one < group))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    low = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return (*low, *(number // one for one in reversed(low) if one * one != number))


@lru_cache(maxsize=4096)
def layer_by_layer(layers: int) -> Family:
    """None of a chunk's layers, one, and so on to all ``layers`` of the longest."""
    some = tuple(Recompute(kind="layers", layers=number) for number in range(1, layers))
    return Family(kinds=(NONE, *some, FULL))


def _largest_chunk(base: Base, cut: Job) -> int:
    """Layers of the longest chunk."""
    layout = cut.layout
    return -(-max(layout.pp_split or (-(-base.graph.layers // layout.pp),)) // layout.vpp)


def _with_micro_batch(job: Job, micro_batch: int) -> Job:
    return replace(job, data=_with_sequences(job.data, micro_batch))


@lru_cache(maxsize=4096)
def _with_sequences(data: Data, micro_batch: int) -> Data:
    return replace(data, micro_batch=micro_batch)


def _around(layers: int, pp: int) -> Iterator[Split]:
    """All ranks alike but the first and the last, which have layers less for their embedding, head and loss, one each at the least, as
    Megatron and torchtitan count them: interleaved, such a cut waits less than one whose slowest rank is the fastest."""
    each = -(-(layers + 2) // pp)
    less = pp * each - layers
    if pp > 2 and less <= each:
        yield (each - less // 2, *(each,) * (pp - 2), each - (less + 1) // 2)


def _with_split(job: Job, split: Split) -> Job:
    return job if split is None else replace(job, layout=replace(job.layout, pp_split=split))


def _micro_batches(global_batch: int | None) -> tuple[int, ...]:
    """What divides the batch; without one, powers of two and what lies between."""
    if global_batch is not None:
        return divisors(global_batch)
    powers = [1 << power for power in range(MOST_SEQUENCES.bit_length())]
    return tuple(sorted({*powers, *(3 * power for power in powers[:-2])}))


def _losses(want: Wanted, base: Base) -> tuple[Loss, ...]:
    kinds = _OWN_LOSSES.get(base.job.stack)
    if kinds is None or "loss" in want.written:
        return (base.job.loss,)
    return tuple(Loss(kind=kind) for kind in kinds)  # type: ignore[arg-type]


def _experts(base: Base) -> int:
    size = base.graph.sizes.get("experts", 0)
    return size if isinstance(size, int) else 0


@lru_cache(maxsize=64)
def _selections(job: Job, graph: Graph) -> tuple[Family, ...]:
    """Every set of modules that the stack can recompute; where it names none, its own selection if that runs anything again."""
    modules = modules_of(job, graph)
    if modules.names:
        return (Family(kinds=tuple(of_modules(some) for some in subsets(modules.names, modules) if some)),)
    block = next(run.block for run in graph.runs if run.block.role == "layer")
    try:
        return (Family(kinds=(SELECTIVE,)),) if stacks.segments(block, context_of(job, graph), SELECTIVE) else ()
    except Unsupported:
        return ()


@lru_cache(maxsize=64)
def modules_of(job: Job, graph: Graph) -> Modules:
    layers = dict.fromkeys(run.block for run in graph.runs if run.block.role == "layer")
    return stacks.recomputable(layers, context_of(job, graph))


def subsets(names: Iterable[str], modules: Modules) -> list[frozenset[str]]:
    """Sets of these modules, the empty one too, none of which holds a module beside the one that it is part of."""
    listed = sorted(names)
    every = chain.from_iterable(combinations(listed, number) for number in range(len(listed) + 1))
    return [frozenset(some) for some in every if not any({*pair} <= {*some} for pair in modules.inside)]


def of_modules(names: Iterable[str]) -> Recompute:
    return Recompute(kind="modules", modules=tuple(sorted(names)))
