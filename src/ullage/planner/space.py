"""Every strategy that a job leaves open, as plain nested choices; what contradicts itself is left out by the checks of job/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import isqrt
from pathlib import Path as FilePath

from ullage.errors import Contradiction, InvalidInput, UllageError
from ullage.frozen import FrozenMap, frozen
from ullage.hardware.catalogue import cluster
from ullage.hardware.cluster import Cluster
from ullage.job import fields
from ullage.job.document import Document, read_document
from ullage.job.engine import ENGINES, STAGES
from ullage.job.fields import Section
from ullage.job.job import Job, Layout, Loss, Recompute
from ullage.job.overrides import apply_overrides
from ullage.job.read import layout_of, read_job
from ullage.model.build import graph as build
from ullage.model.graph import Graph

DEGREES = ("dp", "tp", "sp", "cp", "pp", "vpp", "schedule", "pp_split", "ep", "etp")
SEARCHED = ("single", "ddp", "zero1", "fsdp2", "deepspeed", "megatron")
"""Engines that a plan takes where the job names none; FSDP1 is FSDP2's predecessor and is planned for where it is named."""

_SHARD_GROUPS = ("fsdp1", "fsdp2")
_OWN_LOSSES = {"megatron": ("vocab-parallel", "vocab-parallel-fused"), "torchtitan": ("full", "vocab-parallel")}
"""Loss kinds by stack, where there is more than its own whole one."""


@frozen
class Base:
    """A job under one engine, on one GPU of each degree: what all of the engine's strategies share. options of it are the job's."""

    job: Job
    graph: Graph


@frozen
class Wanted:
    """What is asked for. document: the job's keys; written: those that are set, dotted; layout: the degrees that are.

    smallest: of strategies that differ in what only costs memory, the smallest alone: states divided over all ranks, one chunk a rank.
    """

    document: FrozenMap
    written: frozenset[str]
    layout: Layout
    global_batch: int | None
    micro_batch: int | None
    grad_accum: int | None
    engines: tuple[str, ...]
    smallest: bool = False

    def fixed(self, name: str) -> object:
        """The value of ``layout.name`` where it is set."""
        return getattr(self.layout, name) if f"layout.{name}" in self.written else None


def wanted(
    source: str | FilePath | Mapping[str, object], overrides: tuple[str, ...] = (), engines: tuple[str, ...] = ()
) -> Wanted:
    """A job file or mapping whose missing keys are free. engines: those to search; else the job's own, else all."""
    document = read_document(source)
    try:
        apply_overrides(document, overrides)
        return wanted_of(_absolute(document), engines)
    except UllageError as error:
        place = document.place(error.key)
        raise (error.at(place) if place else error) from None


def wanted_of(values: Mapping[str, object], engines: tuple[str, ...] = ()) -> Wanted:
    """The same of plain values."""
    data = Section(fields.as_mapping(values.get("data") or {}, "data"), "data", [])
    count = fields.optional(fields.integer(1))
    given = {name: data.take(name, count, None) for name in _COUNTS}
    if given["global_batch"] is not None and given["grad_accum"] is not None and given["micro_batch"] is not None:
        raise Contradiction(
            "says how many micro-batches a step has, and so do micro_batch and grad_accum",
            key="data.global_batch",
            value=given["global_batch"],
            remedy="keep two of the three",
        )
    return Wanted(
        document=FrozenMap(values),
        written=frozenset(_written(values)),
        layout=layout_of(values),
        engines=_engines(values, engines),
        global_batch=given["global_batch"],
        micro_batch=given["micro_batch"],
        grad_accum=given["grad_accum"],
    )


def _absolute(document: Document) -> Mapping[str, object]:
    """A model's relative path is relative to its file."""
    model = document.values.get("model")
    if isinstance(model, str) and (document.base_dir / model).exists():
        return {**document.values, "model": str(document.base_dir / model)}
    return document.values


def _written(values: Mapping[str, object]) -> Iterator[str]:
    for key, value in values.items():
        if value is None:
            continue
        yield key
        if isinstance(value, Mapping):
            yield from (f"{key}.{name}" for name, inner in value.items() if inner is not None)


def _engines(values: Mapping[str, object], asked: tuple[str, ...]) -> tuple[str, ...]:
    section = values.get("engine")
    own = section.get("name") if isinstance(section, Mapping) else None
    for name in asked:
        fields.choice(*ENGINES)(name, "--engine")
    if own is None:
        return asked or SEARCHED
    named = fields.choice(*ENGINES)(own, "engine.name")
    if asked and named not in asked:
        raise InvalidInput(
            "is not among the engines to search",
            key="engine.name",
            value=named,
            allowed=", ".join(asked),
            remedy="leave it out",
        )
    return (named,)


def cluster_of(want: Wanted) -> Cluster:
    """The cluster that the job names."""
    written = want.document.as_dict().get("cluster")
    if not isinstance(written, str | Mapping):
        raise InvalidInput("is missing", key="cluster", allowed="GPUSxDEVICE such as 8xH100-SXM-80GB")
    return cluster(written)


def bases(want: Wanted) -> tuple[list[Base], dict[str, UllageError]]:
    """The job under each engine that can run it at all, once for each way to leave states on the host, and why the others cannot."""
    found: list[Base] = []
    refused: dict[str, UllageError] = {}
    for name in want.engines:
        for values in _variants(want, name):
            try:
                job = read_job(values)
                found.append(Base(job=job, graph=build(job.model, mtp=name == "megatron")))
            except UllageError as error:
                refused.setdefault(name, error)
    known = {base.job.engine.name for base in found}
    return found, {name: error for name, error in refused.items() if name not in known}


_OFFLOADS: dict[str, tuple[dict[str, object], ...]] = {
    "deepspeed": ({"optimizer": "cpu"}, {"optimizer": "cpu", "params": "cpu"}),
    "fsdp2": ({"optimizer": "cpu", "params": "cpu"},),
}
"""What an engine can leave on the host, where its account and its time know it."""

_EVERY_STAGE = 3
"""ZeRO stage at which DeepSpeed takes all that it can leave on the host: what of it a lower stage refuses is counted as refused."""


def _variants(want: Wanted, name: str) -> Iterator[dict[str, object]]:
    values = _of_engine(want, name)
    yield values
    if "offload" not in want.written:
        for offload in _OFFLOADS.get(name, ()):
            engine = values["engine"]
            assert isinstance(engine, dict)
            stage = {} if "zero_stage" in engine else {"zero_stage": _EVERY_STAGE}
            yield {**values, "offload": offload, "engine": {**engine, **stage}}


def _of_engine(want: Wanted, name: str) -> dict[str, object]:
    values = want.document.as_dict()
    engine = values.get("engine")
    data = values.get("data")
    layout = values.get("layout")
    own: dict[str, object] = {**(engine if isinstance(engine, dict) else {}), "name": name}
    values["engine"] = own
    values["data"] = {
        **{key: value for key, value in (data if isinstance(data, dict) else {}).items() if key not in _COUNTS},
        "micro_batch": 1,
        "grad_accum": 1,
    }
    kind = layout.get("cp_kind") if isinstance(layout, dict) else None
    values["layout"] = {"cp_kind": kind} if kind else {"cp_kind": "ulysses"} if name == "deepspeed" else {}
    if name == "megatron":
        if "loss" not in want.written:
            values["loss"] = "vocab-parallel"
        own.setdefault("options", _MEGATRON_OPTIONS)
    return values


_MEGATRON_OPTIONS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
"""What everybody sets who trains with Megatron's distributed optimizer: they are off by default, and cost no memory."""

_COUNTS = ("global_batch", "micro_batch", "grad_accum")


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    low = [one for one in range(1, isqrt(number) + 1) if number % one == 0]
    return (*low, *(number // one for one in reversed(low) if one * one != number))


MOST_SEQUENCES = 4096


def micro_batches(global_batch: int | None) -> tuple[int, ...]:
    """What divides the batch; without one, powers of two and what lies between."""
    if global_batch is not None:
        return divisors(global_batch)
    found = {1 << power for power in range(MOST_SEQUENCES.bit_length())} | {
        3 << power for power in range(MOST_SEQUENCES.bit_length() - 2)
    }
    return tuple(sorted(found))


def tensor_parallel(want: Wanted, base: Base, gpus: int) -> tuple[int, ...]:
    """Within a node, unless the job says more."""
    own = want.fixed("tp")
    inside = min(base.job.cluster.scale_up_gpus, gpus)
    return (own,) if isinstance(own, int) else divisors(inside)


def degrees(want: Wanted, name: str, number: int) -> tuple[int, ...]:
    """What an axis may be: its fixed degree, or all divisors of ``number``."""
    own = want.fixed(name)
    return (own,) if isinstance(own, int) else divisors(number)


def sequence_parallel(want: Wanted, tp: int) -> tuple[bool, ...]:
    own = want.fixed("sp")
    if isinstance(own, bool):
        return (own,)
    return (False, True) if tp > 1 else (False,)


_SAY_STAGE = (
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    "sharding_strategy",
    "reshard_after_forward",
)
"""Options in which an engine says its stage in words of its own (job/engine.py, default_stage)."""


def zero_stages(want: Wanted, base: Base, dp: int) -> tuple[int, ...]:
    own = base.job.engine
    if "engine.zero_stage" in want.written or any(name in own.options for name in _SAY_STAGE):
        return (own.zero_stage,)
    if (
        base.job.offload.optimizer != "none"
    ):  # sharded though it be by one rank: only a sharded optimizer is left on the host
        return tuple(stage for stage in STAGES[own.name] if stage)
    return STAGES[own.name] if dp > 1 else STAGES[own.name][:1]


def shard_groups(want: Wanted, base: Base, group: int, stage: int) -> tuple[int | None, ...]:
    """All ranks, or a divisor of them: a replica of the shards on each group (HSDP)."""
    own = base.job.engine
    if want.smallest or "engine.shard_group" in want.written or own.name not in _SHARD_GROUPS:
        return (own.shard_group,)
    return (None, *(one for one in divisors(group) if 1 < one < group))


def losses(want: Wanted, base: Base) -> tuple[Loss, ...]:
    if "loss" in want.written:
        return (base.job.loss,)
    kinds = _OWN_LOSSES.get(base.job.stack)
    return tuple(Loss(kind=kind) for kind in kinds) if kinds else (base.job.loss,)  # type: ignore[arg-type]


def recomputes(want: Wanted, base: Base) -> Recompute | None:
    """The job's own, where it says one."""
    return base.job.recompute if "recompute" in want.written else None
