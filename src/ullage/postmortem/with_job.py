"""What the job adds to the evidence: which tensor was asked for, and what fills the card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ullage.engines.base import Account
from ullage.engines.estimate import located, moment
from ullage.engines.fsdp2.policy import keeps_whole_gradients
from ullage.engines.registry import ranks_of
from ullage.errors import UllageError
from ullage.frozen import frozen
from ullage.job.adapted import graph_of, model_of
from ullage.job.job import Job
from ullage.memory.program import Peak
from ullage.memory.rank import Rank
from ullage.model.graph import Graph
from ullage.postmortem.causes import Kind, Reason, Tensor
from ullage.postmortem.elsewhere import elsewhere
from ullage.postmortem.evidence import Evidence
from ullage.postmortem.inactive import held_whole, uncut
from ullage.postmortem.matching import SAYS_NOTHING, Candidate, candidates, has_size
from ullage.postmortem.outside_step import ROOMY, around_steps, base_bytes, host, loaded_whole, whole_base_bytes
from ullage.postmortem.particular import experts, lengths
from ullage.postmortem.tensors import Made, highest, kind_of, made
from ullage.units import format_bytes

_STATES = ("parameters", "buffers", "gradients", "optimizer")
REPLICAS = ("ddp", "zero1")
"""Engines under which every rank holds all parameters and gradients."""
_TIGHT = 0.75
_OVER = 1.0
_LARGE = 0.1
"""Of the card: a tensor of this size is a cause by itself, whatever else is there."""


@frozen
class Held:
    """A pipeline rank's account at its peak. account: None where the engine's account does not model the job (why says it)."""

    rank: Rank
    account: Account
    peak: Peak


@frozen
class Known:
    """The job as the account knows it. held: every pipeline rank, empty where it is not modelled; unmodelled: why not.

    stage: the one whose rank failed, where that is told.
    """

    job: Job
    graph: Graph
    held: tuple[Held, ...]
    ranks: tuple[Rank, ...]
    unmodelled: str | None = None
    stage: int | None = None

    @property
    def worst(self) -> Held | None:
        """The stage that failed, or where none is told the one that holds most."""
        return max(self.held, key=lambda one: (one.rank.index == self.stage, one.peak.bytes), default=None)

    @property
    def asked(self) -> tuple[Held, ...]:
        """The stages of which a tensor may be what failed."""
        return tuple(one for one in self.held if self.stage in (None, one.rank.index))


def known(job: Job, failed: int | None = None) -> Known:
    """The job's accounts. A refusal leaves the tensors that the model alone tells. failed: the global rank that ran out, if told."""
    layout = job.layout
    stage = failed // (layout.world // layout.pp) if failed is not None and failed < layout.world else None
    graph = model_of(job)
    ranks = ranks_of(job, graph)
    held = []
    try:
        graph = graph_of(job)
        ranks = ranks_of(job, graph)
        for rank in ranks:
            peak, found = located(job, graph, rank)
            held.append(Held(rank=rank, account=found, peak=peak))
    except UllageError as error:
        return Known(job=job, graph=graph, held=(), ranks=ranks, unmodelled=str(error))
    return Known(job=job, graph=graph, held=tuple(held), ranks=ranks, stage=stage)


def matching(here: Known, evidence: Evidence) -> tuple[Candidate, ...]:
    """The tensors of the job whose request failed."""
    tried = evidence.numbers.tried_bytes
    if tried is None or tried <= SAYS_NOTHING:
        return ()
    parts = {1, here.job.layout.cp}

    def wanted(size: int) -> bool:
        return any(has_size(size * n, evidence.numbers) for n in parts)

    tensors = [one for held in here.asked for one in (*made(held.account, wanted), *_unfused(held))]
    ends = {rank.index: rank for rank in (here.ranks[0], here.ranks[-1]) if here.stage in (None, rank.index)}
    others = [one for rank in ends.values() for one in elsewhere(here.job, here.graph, rank)]
    others += uncut(here.job.layout, tensors)
    shapes = {(one.kind, one.bytes): one.shape for one in others}
    found = candidates([*tensors, *others], evidence.numbers, evidence.phases)
    return tuple(one if one.made.shape else _shaped(one, shapes) for one in found)


def _unfused(held: Held) -> Iterator[Made]:
    """The temporary that an optimizer without a fused kernel makes beside each of its state's tensors (torch/optim/adam.py: denom)."""
    for item in held.account.late:
        for size in set(item.pieces) or {item.bytes}:
            yield Made(
                kind="optimizer-step",
                category="transient",
                what=f"a temporary as large as {item.what}, of an optimizer that is not fused",
                bytes=size,
                moment="optimizer step",
                low_bytes=held.account.static_bytes,
                high_bytes=held.peak.bytes,
                note=item.formula,
            )


def _shaped(one: Candidate, shapes: dict[tuple[Kind, int], tuple[int, ...]]) -> Candidate:
    shape = shapes.get((one.made.kind, one.made.bytes), ())
    return replace(one, made=replace(one.made, shape=shape))


def reasons(here: Known, evidence: Evidence, found: tuple[Candidate, ...]) -> Iterator[Reason]:
    """Reasons out of the job: the tensors first, then what fills the card."""
    if evidence.recognised == "not-oom":
        return
    if here.worst is not None:
        yield from host(here.job, here.worst.account.host_bytes * here.job.cluster.gpus_per_node)
    if evidence.recognised == "host-oom":
        return
    capacity = evidence.numbers.capacity_bytes or here.job.cluster.device.capacity_bytes
    yield from _tensors(found, capacity)
    if not found and here.worst is not None:
        yield from _unexplained(evidence, capacity)
    if here.worst is not None:
        static = _by_category(here.worst)
        yield from _states(here.job, static, capacity)
        yield from _rest(here, here.worst, capacity)
        worst = here.worst
        yield from held_whole(here.job.layout, evidence, worst.peak.live)
        yield from lengths(here.job, worst.peak.bytes, capacity)
        yield from experts(here.job, worst.peak, evidence, capacity)
        yield from around_steps(here.job, worst.rank, sum(static.values()), worst.peak.bytes, capacity)
    elif here.job.lora is not None:
        yield from _frozen(here, capacity)


def _tensors(found: tuple[Candidate, ...], capacity: int) -> Iterator[Reason]:
    for number, one in enumerate(found):
        large = one.made.bytes >= _LARGE * capacity
        weight = one.likelihood * (3.0 if large else 1.5) * (0.5 if one.made.against else 1.0)
        if not number or one.likelihood >= _LARGE:
            yield Reason(kind=one.made.kind, weight=weight, why=_told(one), tensor=_tensor(one.made))


def _tensor(one: Made) -> Tensor:
    return Tensor(what=one.what, shape=one.shape, bytes=one.bytes, moment=one.moment)


def _told(one: Candidate) -> str:
    note = f" ({one.made.note})" if one.made.note else ""
    where = "" if one.made.in_step else ", not part of the modelled step"
    return (
        f"{format_bytes(one.made.bytes)} is {one.made.what}{note}, made in: {one.made.moment}{where}; "
        f"{one.likelihood:.0%} likely among the tensors of that size"
    )


def _unexplained(evidence: Evidence, capacity: int) -> Iterator[Reason]:
    tried = evidence.numbers.tried_bytes
    if tried is not None and tried > capacity:
        yield Reason(
            kind="config",
            weight=1.5,
            why=f"no tensor of this job has {format_bytes(tried)}: the run is not the job, or a shape is wrong",
        )


def _by_category(held: Held) -> dict[str, int]:
    """Bytes of the states: between two steps, and gradients at the end of a backward, where all live that no step leaves behind."""
    size = dict.fromkeys(_STATES, 0)
    for item, count in held.account.static:
        if item.category in size:
            size[item.category] += item.bytes * count
    return size | {"gradients": highest(held.account.program, "gradients")}


def _frozen(here: Known, capacity: int) -> Iterator[Reason]:
    """A LoRA job that no account models: its frozen weights are known all the same, and what they leave is for activations."""
    weights = max(base_bytes(here.job, rank) for rank in here.ranks)
    yield from _states(here.job, {"parameters": weights}, capacity)
    whole = max(whole_base_bytes(here.job, rank) for rank in here.ranks)
    if weights <= ROOMY * capacity < whole:
        yield Reason(
            kind="load",
            weight=loaded_whole(here.job),
            why=f"shared out, frozen weights take {format_bytes(weights)} of {format_bytes(capacity)}; loaded whole before that, as "
            f"without cpu_ram_efficient_loading, {format_bytes(whole)}",
        )
    if weights < _TIGHT * capacity:
        yield Reason(
            kind="activations",
            weight=1.5,
            why=f"frozen weights take {format_bytes(weights)} of {format_bytes(capacity)}, and adapters with their states little: "
            "the rest was activations",
        )


def _states(job: Job, size: dict[str, int], capacity: int) -> Iterator[Reason]:
    """States that fill the card, and the part of them that is a replica."""
    states = sum(size.values())
    share = states / capacity
    if share < _TIGHT / 2:
        return
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in size.items() if n)
    why = f"states alone take {format_bytes(states)} of {format_bytes(capacity)} ({parts}), before any activation"
    over = share > _OVER
    replica = _replicated(job, size)
    weight = 3.6 if over else 3.0 * share if share >= _TIGHT else 1.2 * share
    if replica >= capacity / 3:
        left = states - replica + replica // job.layout.dp
        cured = left < _TIGHT * capacity  # then the replica says more than that states are large
        yield Reason(
            kind="replica-not-shard",
            weight=max(weight + 0.2 if cured else 0.0, 2.6 * min(1.0, share / _TIGHT)),
            why=f"each of {job.layout.dp} data-parallel ranks holds a whole copy of {format_bytes(replica)}: "
            f"{_why_whole(job)}. Shared out, states would be {format_bytes(left)}",
        )
    if _shards_alone(job):
        yield Reason(
            kind="replica-not-shard",
            weight=1.5,
            why=f"{job.engine.name} at stage {job.engine.zero_stage} shares states out among data-parallel ranks, and there is one: it has "
            "all of them",
        )
    whole = _unsynced(job, size)
    if whole >= capacity / 10:
        cured = states - whole < _TIGHT * capacity
        yield Reason(
            kind="unsynced-accumulation",
            weight=max(weight + 0.2 if cured else 0.0, 2.6 * min(1.0, whole / capacity / _TIGHT)),
            why=f"gradients are reduced in the last of {job.data.grad_accum} micro-batches alone, and stay whole until then: "
            f"{format_bytes(whole)} more than shards (accelerate's no_sync; sync_each_batch reduces each)",
        )
    if _upcast(job) and share >= _TIGHT:
        yield Reason(
            kind="config",
            weight=1.0,
            why="parameters, gradients and moments are in fp32 under mixed precision, as accelerate makes them of a model loaded in 16 "
            f"bits too; in 16 bits they would be {format_bytes(states // 2)}",
        )
    yield Reason(kind="states", weight=5.0 if over and not replica and not whole else weight, why=why)


def _upcast(job: Job) -> bool:
    """What the Trainer shards by FSDP is in fp32 and computes in 16 bits (accelerate 0.30 and later, accelerator.py: prepare_model)."""
    precision = job.precision
    mixed = precision.params == "fp32" and precision.compute != "fp32"
    return mixed and job.engine.name in ("fsdp1", "fsdp2") and job.stack == "transformers" and job.lora is None


def _unsynced(job: Job, size: dict[str, int]) -> int:
    """Bytes of gradients that would be shards, were they reduced in each micro-batch."""
    shards = job.engine.shard_group or job.layout.dp * job.layout.cp
    return size["gradients"] * (shards - 1) // shards if keeps_whole_gradients(job) else 0


def _replicated(job: Job, size: dict[str, int]) -> int:
    """Bytes that every data-parallel rank holds whole and could share."""
    if job.layout.dp == 1:
        return 0
    if job.lora is not None:
        whole_base = job.lora.base != "bf16" and job.engine.name == "deepspeed"
        return size["parameters"] if whole_base or not _shards_parameters(job) else 0
    name, stage = job.engine.name, job.engine.zero_stage
    if _shards_parameters(job):
        return 0
    if name == "ddp" or stage == 0:
        return sum(size.values())
    return size["parameters"] + (0 if stage >= 2 else size["gradients"])


def _shards_parameters(job: Job) -> bool:
    name, stage = job.engine.name, job.engine.zero_stage
    return name in ("fsdp1", "fsdp2") or (name in ("deepspeed", "megatron") and stage == 3)


def _shards_alone(job: Job) -> bool:
    """Sharding was asked for, and there is no one to share with."""
    asked = job.engine.name in ("fsdp1", "fsdp2", "zero1") or (
        job.engine.name in ("deepspeed", "megatron") and job.engine.zero_stage > 0
    )
    return asked and job.layout.dp * job.layout.cp == 1


def _why_whole(job: Job) -> str:
    if job.lora is not None and job.lora.base != "bf16" and job.engine.zero_stage == 3:
        return "ZeRO does not shard bitsandbytes' quantised weights"
    if job.engine.name in REPLICAS or job.engine.zero_stage == 0:
        return f"{job.engine.name} shards {'the optimizer alone' if job.engine.name == 'zero1' else 'nothing'}"
    return f"ZeRO stage {job.engine.zero_stage} shards no parameters; to shard them takes stage 3"


def _rest(here: Known, worst: Held, capacity: int) -> Iterator[Reason]:
    """What is on top of the states at the peak, by kind, where the peak passes the card."""
    late = set(worst.account.late)
    moments = " ".join(worst.peak.moments)
    kinds: dict[Kind, int] = {}
    for item, count in worst.peak.live.items():
        kind = kind_of(item, moments, late=item in late)
        if item.category not in _STATES:
            kinds[kind] = kinds.get(kind, 0) + item.bytes * count
    rest = sum(kinds.values())
    pressure = min(1.0, max(0.0, 2 * worst.peak.bytes / capacity - 1))  # a card half empty does not run out
    when = moment(worst.peak)
    for kind, size in sorted(kinds.items(), key=lambda entry: -entry[1]):
        if size < capacity / 20 or kind == "states":
            continue
        yield Reason(
            kind=kind,
            weight=3.0 * pressure * min(1.0, size / capacity + size / rest / 3),
            why=f"{format_bytes(size)} of {format_bytes(worst.peak.bytes)} predicted at the peak ({when}) are {_WORDS.get(kind, kind)}",
        )
    if len(here.held) > 1:
        yield from _end(here, worst, capacity)


_WORDS: dict[Kind, str] = {
    "activations": "activations and what backward needs for a moment",
    "logits": "logits, their loss and its gradient",
    "attention-scores": "attention scores",
    "padding-mask": "an attention mask",
    "optimizer-step": "temporaries of the optimizer's step",
    "config": "communication buckets, whose size is a setting",
}


def _end(here: Known, worst: Held, capacity: int) -> Iterator[Reason]:
    """A pipeline whose end holds far more than its middle; where the others fit, that it is an end is the cause."""
    others = [one.peak.bytes for one in here.held if one is not worst]
    if worst.peak.bytes > 1.25 * min(others) and worst.rank.index in (0, len(here.held) - 1):
        end = "first" if worst.rank.index == 0 else "last"
        fit = max(others) <= ROOMY * capacity < worst.peak.bytes
        yield Reason(
            kind="pipeline-end",
            weight=3.2 if fit else 1.5,
            why=f"the {end} stage holds {format_bytes(worst.peak.bytes)} where the least holds {format_bytes(min(others))}"
            + (", and every other fits" if fit else ""),
        )
