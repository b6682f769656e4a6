"""What is asked for: a job whose missing keys are free, and the same job under each engine that may run it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath

from ullage.engines.reach import refuse_what_is_not_read
from ullage.errors import Contradiction, InvalidInput, UllageError
from ullage.frozen import FrozenMap, frozen, replace
from ullage.hardware.catalogue import cluster
from ullage.hardware.cluster import Cluster
from ullage.job import fields
from ullage.job.adapted import graph_of
from ullage.job.document import Document, read_document
from ullage.job.engine import ENGINES
from ullage.job.fields import Section
from ullage.job.job import Job, Layout
from ullage.job.overrides import apply_overrides
from ullage.job.read import layout_of, read_job
from ullage.model.graph import Graph
from ullage.timing.step import refuse_untimed

DEGREES = ("dp", "tp", "sp", "cp", "pp", "vpp", "schedule", "pp_split", "ep", "etp")
SEARCHED = ("single", "ddp", "zero1", "fsdp2", "deepspeed", "megatron")
"""Engines that a plan takes where the job names none; FSDP1 is FSDP2's predecessor and is planned for where it is named."""


@frozen
class Base:
    """A job under one engine, a replica on each GPU: what all of the engine's strategies share."""

    job: Job
    graph: Graph

    def graph_for(self, job: Job) -> Graph:
        """Of one of them: beside adapters recomputation asks for gradients that nothing else does (job/adapted.py)."""
        return graph_of(job) if job.lora or job.freeze else self.graph


@frozen
class Wanted:
    """What is asked for. document: the job's keys; written: those that are set, dotted; layout: the degrees that are.

    smallest: of strategies that differ in what only costs memory, the smallest alone: states divided over all ranks, one chunk a rank.
    tight: whether one that may not fit is asked for too.
    """

    document: FrozenMap
    written: frozenset[str]
    layout: Layout
    global_batch: int | None
    micro_batch: int | None
    grad_accum: int | None
    engines: tuple[str, ...]
    smallest: bool = False
    tight: bool = False

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


def with_keys(want: Wanted, change: dict[str, object]) -> Wanted:
    """The same request with some keys set, or left out (None)."""
    values = want.document.as_dict()
    for key, value in change.items():
        section, _, name = key.rpartition(".")
        inner = values
        if section:
            found = values.get(section)
            inner = dict(found) if isinstance(found, dict) else {}
            values[section] = inner
        if value is None:
            inner.pop(name, None)
        else:
            inner[name] = value
    return replace(wanted_of(values, want.engines), tight=want.tight)


def _absolute(document: Document) -> Mapping[str, object]:
    """A model's relative path is relative to its file."""
    model = document.values.get("model")
    if isinstance(model, str) and os.path.exists(document.base_dir / model):  # a Path's raises if too long
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
                if job.lora or job.freeze:
                    refuse_what_is_not_read(job)
                    refuse_untimed(job)
                found.append(Base(job=job, graph=graph_of(job)))
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
"""ZeRO stage under which DeepSpeed leaves all that it can on the host; lower ones, which are free too, refuse a part of it."""


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
