"""Seconds of one optimizer step: forwards and backwards in the schedule's order, what is exchanged, the optimizer.

Left out, and so not in any figure: loading data, logging, checkpoints, evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from ullage.engines.base import context_of
from ullage.engines.fsdp2.captured import as_run
from ullage.engines.pipeline import actions_of, micro_batches_of_chunk
from ullage.engines.registry import ranks_of
from ullage.errors import Unsupported
from ullage.frozen import frozen, replace
from ullage.job import adapted_experts
from ullage.job.adapted import graph_of
from ullage.job.job import Job, Recompute
from ullage.memory.rank import Chunk, placed
from ullage.model.count import flops_per_token, forward_flops_per_token
from ullage.model.graph import Block, Graph, Op
from ullage.schedule import Action, finish_times
from ullage.timing import offload
from ullage.timing.again import run_again
from ullage.timing.machine import peak_flops_per_s
from ullage.timing.stage import Stage, send_s, waits_for_sends


@frozen
class StepTime:
    """parts: seconds of the slowest rank by part; they add up to ``step_s``.

    mfu: model FLOPs (model/count.py: the masked half of causal attention counted too, no recomputation) over what the GPUs could do
    at their dense peak of bf16 in the same time. hfu: with what recomputation runs again of forwards, counted likewise
    (Korthikanti et al., arXiv 2205.05198, count three times that for attention).
    """

    step_s: float
    parts: tuple[tuple[str, float], ...]
    tokens_per_s_per_gpu: float
    mfu: float
    hfu: float

    @property
    def bubble(self) -> float:
        return dict(self.parts).get("bubble", 0.0) / self.step_s


@lru_cache(maxsize=64)
def stages(job: Job, graph: Graph) -> tuple[Stage, ...]:
    """Every pipeline rank of a job, timed."""
    refuse_untimed(job)
    job = as_run(job)
    context = context_of(job, graph)
    found: list[Stage] = []
    known: dict[tuple[Chunk, ...], Stage] = {}
    for rank in ranks_of(job, graph):
        like = known.get(rank.chunks)
        found.append(Stage(job, graph, context, rank) if like is None else like.on(rank))
        known[rank.chunks] = found[-1]
    return tuple(found)


PARTLY_TRAINED = ("single", "ddp", "fsdp1", "fsdp2", "deepspeed", "megatron")
"""Engines whose seconds are known where a part of a model is frozen."""


def refuse_untimed(job: Job) -> None:
    """Raises Unsupported for what no time is told of."""
    if job.stack == "traced":
        raise Unsupported("is not told by its ops' FLOPs", key="the time of a traced module")
    if (job.lora or job.freeze) and job.engine.name not in PARTLY_TRAINED:
        what = f"is not timed under engine {job.engine.name} yet"
        raise Unsupported(what, key="a model of which only a part is trained")
    if job.lora is not None and job.engine.options.get(adapted_experts.TARGETS):
        raise Unsupported("is not timed", key=f"engine.options.{adapted_experts.TARGETS}", value="set")
    if job.lora is not None and job.lora.base == "int8":
        raise Unsupported("is not timed", key="lora.base", value="int8")
    offload.refuse(job)
    if job.precision.compute == "fp4" and "fp4" not in dict(job.cluster.device.flops_per_s):
        what = f"is not multiplied by {job.cluster.device.name}"
        raise Unsupported(what, key="precision.compute", value="fp4", remedy="take fp8 or bf16, or a Blackwell GPU")


@frozen
class Order:
    """What every rank does in one step, in order, and when each action ends, in seconds."""

    actions: tuple[tuple[Action, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]


def order(job: Job, found: tuple[Stage, ...]) -> Order:
    """The schedule's own actions, simulated with each stage's own seconds."""
    plan = tuple(actions_of(job, stage.rank.index) for stage in found)
    count = micro_batches_of_chunk(job)
    sent = send_s(job, found[0].context)
    waits = sent if waits_for_sends(job) else 0.0
    ends = finish_times(
        plan,
        lambda rank, action: found[rank].seconds(action, count) + waits,
        send_s=sent - waits,
        stages=[placed(job.layout, stage.rank.index) for stage in found],
    )
    return Order(actions=plan, ends_s=ends)


@lru_cache(maxsize=4096)
def step_time(job: Job, graph: Graph | None = None) -> StepTime:
    """Raises Unsupported where the device's peaks are not known, for a traced module, whose ops have no named matrices, for int8
    bases and adapters of experts, and for states on the host of an engine that is not known to step them there."""
    refuse_untimed(job)
    graph = graph or graph_of(job)
    found = stages(job, graph)
    totals = [end + stage.outside.total_s for end, stage in zip(_ends(job, found), found, strict=True)]
    slowest = max(range(len(found)), key=totals.__getitem__)
    step_s = totals[slowest]
    parts = dict(found[slowest].parts.items)
    parts["bubble"] = step_s - sum(parts.values())
    tokens = job.data.seq_len * job.data.micro_batch * job.data.grad_accum * job.layout.dp
    world = job.layout.world
    possible = step_s * world * peak_flops_per_s(job.cluster.device, "bf16")
    flops = flops_per_token(graph, job.data.seq_len)
    return StepTime(
        step_s=step_s,
        parts=tuple((name, value) for name, value in parts.items() if value > 1e-9),
        tokens_per_s_per_gpu=tokens / step_s / world,
        mfu=flops * tokens / possible,
        hfu=(flops + _flops_again_per_token(job, graph, found)) * tokens / possible,
    )


def _flops_again_per_token(job: Job, graph: Graph, found: tuple[Stage, ...]) -> int:
    """Of all pipeline ranks, what backwards run again of forwards."""
    if job.recompute.kind == "none":
        return 0
    counts: Counter[tuple[Block, str]] = Counter()
    for stage in found:
        for element in chain.from_iterable(stage.elements):
            counts[element.block, element.mode] += element.size
    return sum(
        times * forward_flops_per_token(graph, _ops_again(block, found[0], mode, job.recompute), job.data.seq_len)
        for (block, mode), times in counts.items()
    )


def _ops_again(block: Block, stage: Stage, mode: str, recompute: Recompute) -> Iterator[Op]:
    again = run_again(block, stage.context, mode, recompute, stage.place.early_stop)
    return (op for op in block.ops if again.runs(op.name, op.module))


def time_or_why(job: Job) -> StepTime | Unsupported:
    """What ``step_time`` answers or raises, for a reader who has use for either."""
    try:
        return step_time(job)
    except Unsupported as error:
        return error


WARM = 3
"""Micro-batches, in numbers of pipeline stages, after which a schedule repeats itself."""


def _ends(job: Job, found: tuple[Stage, ...]) -> list[float]:
    """When each pipeline rank has ended its last backward.

    A long schedule repeats itself: what one more round of micro-batches adds is taken from the last of a few rounds.
    """
    if job.layout.pp == 1:
        return [sum(time.step_s(job.data.grad_accum) for time in found[0].times)]
    if job.engine.name == "single":  # device_map: a micro-batch is through before the next begins
        alone = _simulated(job, found, 1)
        return [end + (job.data.grad_accum - 1) * max(alone) for end in alone]
    rounds, rest = divmod(job.data.grad_accum, job.layout.pp)
    if rounds <= WARM + 2:
        return [mine[-1] for mine in order(job, found).ends_s]
    first, second = (_simulated(job, found, (WARM + more) * job.layout.pp + rest) for more in (0, 1))
    return [end + (rounds - WARM) * (later - end) for end, later in zip(first, second, strict=True)]


def _simulated(job: Job, found: tuple[Stage, ...], micro_batches: int) -> list[float]:
    shorter = replace(job, data=replace(job.data, grad_accum=micro_batches))
    return [mine[-1] for mine in order(shorter, found).ends_s]
