"""Seconds of one optimizer step: forwards and backwards in the schedule's order, what is exchanged, the optimizer.

Left out, and so not in any figure: loading data, logging, checkpoints, evaluation.
"""

from __future__ import annotations

from functools import lru_cache

from ullage import dtypes
from ullage.calibration.memory import memory_efficiency
from ullage.engines.base import context_of, flag
from ullage.engines.fsdp2.policy import reshards
from ullage.engines.megatron.accounting import recompute_group
from ullage.engines.optimizer import MOMENTS
from ullage.engines.pipeline import actions_of
from ullage.engines.registry import ranks_of
from ullage.errors import Unsupported
from ullage.frozen import frozen
from ullage.job.bind import local_numel
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory.chunk import Element, Replayer, stream_bytes
from ullage.memory.rank import Rank
from ullage.model.build import graph as build
from ullage.model.count import flops_per_token
from ullage.model.graph import STREAM, Block, Graph, Tensor
from ullage.schedule import Action, finish_times
from ullage.timing.blocks import BlockTime, Parts, Place, added, block_time
from ullage.timing.machine import axis_group, bandwidth_bytes_per_s, exchange_s, peak_flops_per_s
from ullage.timing.overlap import Wrapped, backward_s, forward_s

SHARDED = ("fsdp1", "fsdp2")


@frozen
class StepTime:
    """parts: seconds of the slowest rank by part; they add up to ``step_s``.

    mfu: model FLOPs (model/count.py: the masked half of causal attention counted too, no recomputation) over what the GPUs could do
    at their dense peak of bf16 in the same time.
    """

    step_s: float
    parts: tuple[tuple[str, float], ...]
    tokens_per_s_per_gpu: float
    mfu: float

    @property
    def bubble(self) -> float:
        return dict(self.parts).get("bubble", 0.0) / self.step_s


@lru_cache(maxsize=4096)
def step_time(job: Job, graph: Graph | None = None) -> StepTime:
    """Raises Unsupported where the device's peaks are not known, and for a traced module, whose ops have no named matrices."""
    if job.stack == "traced":
        raise Unsupported("is not told by its ops' FLOPs", key="the time of a traced module")
    if job.precision.compute == "fp4":
        raise Unsupported("has no measured efficiency", key="precision.compute", value="fp4")
    graph = graph or build(job.model, mtp=job.engine.name == "megatron")
    context = context_of(job, graph)
    ranks = ranks_of(job, graph)
    stages = [_Stage(job, graph, context, rank) for rank in ranks]
    plan = [actions_of(job, rank.index) for rank in ranks]
    ends = finish_times(plan, lambda rank, action: stages[rank].seconds(action), send_s=_send_s(job, context))
    totals = [mine[-1] + stage.outside.total_s for mine, stage in zip(ends, stages, strict=True)]
    slowest = max(range(len(stages)), key=totals.__getitem__)
    step_s = totals[slowest]
    stage = stages[slowest]
    busy = stage.inside.times(job.data.grad_accum)
    parts = dict(added((busy, stage.outside)).items)
    parts["bubble"] = step_s - sum(parts.values())
    tokens = job.data.seq_len * job.data.micro_batch * job.data.grad_accum * job.layout.dp
    world = job.layout.world
    peak = peak_flops_per_s(job.cluster.device, "bf16")
    return StepTime(
        step_s=step_s,
        parts=tuple((name, value) for name, value in parts.items() if value > 1e-9),
        tokens_per_s_per_gpu=tokens / step_s / world,
        mfu=flops_per_token(graph, job.data.seq_len) * tokens / step_s / world / peak,
    )


def _send_s(job: Job, context: Context) -> float:
    if job.layout.pp == 1:
        return 0.0
    joined = axis_group(job.cluster, job.layout, "pp")
    return exchange_s(job.cluster, joined, "send", stream_bytes(Tensor(name="stream", dims=STREAM), context))


@frozen
class PassTime:
    """Of one chunk of one rank, one micro-batch."""

    forward_s: float
    backward_s: float


class _Stage:
    """One pipeline rank: its chunks' times, and what it does once a step."""

    def __init__(self, job: Job, graph: Graph, context: Context, rank: Rank) -> None:
        self.job, self.graph, self.context, self.rank = job, graph, context, rank
        self.place = Place(cluster=job.cluster, layout=job.layout, attention=job.attention)
        replayer = Replayer(context=context, recompute=job.recompute, group=recompute_group(job))
        self.elements = [replayer.elements(chunk) for chunk in rank.chunks]
        self.times = [self._chunk(at) for at in range(len(rank.chunks))]
        self.inside = added(self._parts(at) for at in range(len(rank.chunks)))
        self.outside = self._once()

    def seconds(self, action: Action) -> float:
        time = self.times[action.chunk]
        return time.forward_s if action.kind == "F" else time.backward_s

    # -- one micro-batch

    def _blocks(self, at: int) -> list[tuple[Element, BlockTime]]:
        return [
            (element, block_time(element.block, self.context, self.place, element.mode, self.job.recompute))
            for element in self.elements[at]
            for _ in range(element.size)
        ]

    def _chunk(self, at: int) -> PassTime:
        found = self._blocks(at)
        forward = [Wrapped(compute_s=time.forward.total_s, gather_s=self._gather_s(one.block)) for one, time in found]
        backward = [
            Wrapped(
                compute_s=time.backward_s,
                gather_s=self._gather_s(one.block) if self._reshards else 0.0,
                reduce_s=self._reduce_s(one.block),
            )
            for one, time in reversed(found)
        ]
        return PassTime(forward_s=forward_s(forward), backward_s=backward_s(backward))

    def _parts(self, at: int) -> Parts:
        found = self._blocks(at)
        busy = added(part for _, time in found for part in (time.forward, time.backward))
        again = sum(time.recompute.total_s for _, time in found)
        waits = self.times[at].forward_s + self.times[at].backward_s - busy.total_s - again
        return busy + Parts(items=(("recompute", again), ("shard", waits)))

    # -- sharded parameters

    @property
    def _sharded(self) -> bool:
        """Whether parameters are gathered block by block."""
        name, stage = self.job.engine.name, self.job.engine.zero_stage
        return name in SHARDED or stage == 3

    @property
    def _reshards(self) -> bool:
        return reshards(self.job) if self.job.engine.name in SHARDED else self._sharded

    def _gather_s(self, block: Block) -> float:
        if not self._sharded:
            return 0.0
        return self._over_shards("all_gather", self._numel(block), self.context.compute)

    def _reduce_s(self, block: Block) -> float:
        """Gradients are reduced in every micro-batch where they are sharded."""
        if not self._sharded:
            return 0.0
        numel, dtype = self._numel(block), self.job.precision.reduce
        found = self._over_shards("reduce_scatter", numel, dtype)
        groups = self.job.layout.dp * self.job.layout.cp
        shards = self._shards
        if shards < groups:
            joined = axis_group(self.job.cluster, self.job.layout, "replica", shards)
            found += exchange_s(self.job.cluster, joined, "all_reduce", dtypes.size_bytes(-(-numel // shards), dtype))
        return found

    @property
    def _shards(self) -> int:
        return self.job.engine.shard_group or self.job.layout.dp * self.job.layout.cp

    def _over_shards(self, kind: str, numel: int, dtype: str) -> float:
        joined = axis_group(self.job.cluster, self.job.layout, "shard", self._shards)
        return exchange_s(self.job.cluster, joined, kind, dtypes.size_bytes(numel, dtype))

    def _numel(self, block: Block) -> int:
        return sum(local_numel(self.graph, param, self.job.layout) for param in block.params if not param.buffer)

    # -- once a step

    def _once(self) -> Parts:
        items = [("optimizer", self._optimizer_s())]
        if not self._sharded:
            items.append(("dp", self._replicas_s()))
        return Parts(items=tuple(item for item in items if item[1]))

    def _replicas_s(self) -> float:
        """Gradients reduced and, of sharded states, parameters gathered: what the last backward and the first forward do not hide."""
        options = self.job.engine.options
        overlaps = self.job.engine.name in ("ddp", "zero1") or flag(options, "overlap_grad_reduce", False)
        gathers = flag(options, "overlap_param_gather", False)
        wait = 0.0
        for expert in (False, True):
            numel = self.rank.numel(expert=expert)
            if not numel:
                continue
            reduce_s, gather_s = self._replica_exchanges(numel, expert)
            last = min(self.times, key=lambda time: time.backward_s)
            wait += max(0.0, reduce_s - last.backward_s) if overlaps else reduce_s
            wait += max(0.0, gather_s - last.forward_s) if gathers else gather_s
        return wait

    def _replica_exchanges(self, numel: int, expert: bool) -> tuple[float, float]:
        cluster, layout = self.job.cluster, self.job.layout
        joined = axis_group(cluster, layout, "expert_dp" if expert else "dp")
        gradients = dtypes.size_bytes(numel, self.job.precision.reduce)
        if self.job.engine.zero_stage == 0 and self.job.engine.name != "zero1":
            return exchange_s(cluster, joined, "all_reduce", gradients), 0.0
        scattered = "all_reduce" if self.job.engine.name == "zero1" else "reduce_scatter"
        params = dtypes.size_bytes(numel, self.job.precision.params)
        return exchange_s(cluster, joined, scattered, gradients), exchange_s(cluster, joined, "all_gather", params)

    def _optimizer_s(self) -> float:
        """States read and written once by a fused kernel, gradients read; clipping reads them twice more and writes them."""
        device = self.job.cluster.device
        moved = self._state_bytes_moved()
        return moved / (bandwidth_bytes_per_s(device) * memory_efficiency(device, "optimizer").value)

    def _state_bytes_moved(self) -> float:
        precision, optimizer = self.job.precision, self.job.optimizer
        numel = 0.0
        for expert in (False, True):
            owners = self.job.layout.expert_dp if expert else self.job.layout.dp * self.job.layout.cp
            shards = (
                self._shards
                if self._sharded
                else owners
                if self.job.engine.zero_stage or self.job.engine.name == "zero1"
                else 1
            )
            numel += self.rank.numel(expert=expert) / min(shards, owners)
        master = dtypes.bits(precision.master or precision.params) / 8
        gradient = dtypes.bits(precision.grads) / 8
        state = (
            len(MOMENTS.get(optimizer.name, ("momentum",)))
            * dtypes.bits(STATE.get(optimizer.state, optimizer.state))
            / 8
        )
        copied = dtypes.bits(precision.params) / 8 if precision.params != precision.master else 0.0
        once = gradient + 2 * master + 2 * state + copied
        if optimizer.impl != "fused":
            once += EAGER_PASSES * 4
        clipped = 3 * gradient if self.job.grad_clip else 0.0
        return numel * (once + clipped)


STATE = {"8bit": "int8"}

EAGER_PASSES = 13
"""Tensors of fp32 that AdamW's foreach kernels read and write beside what one fused kernel does: counted from torch/optim/adamw.py,
_multi_tensor_adamw, and held against no measurement."""
