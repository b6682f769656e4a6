"""What else a run goes through: loading, steps that are routed unevenly, evaluation whose logits are kept, saving a gathered state dict.
On a rank, and on a node's host.

A job that fits while it trains may die in one of them. The step itself is engines/estimate.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ullage import dtypes
from ullage.engines import routing
from ullage.engines.base import Account, context_of
from ullage.engines.estimate import Estimate, Verdict, over_host, verdict_of
from ullage.engines.fsdp2.policy import types_of, units_of
from ullage.engines.fsdp2.units import Unit
from ullage.engines.interval import interval
from ullage.engines.registry import account, ranks_of
from ullage.frozen import frozen
from ullage.job.adapted import graph_of
from ullage.job.engine import OF_TRANSFORMERS
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule
from ullage.memory.chunk import NO_GRAD, Replayer, Wrap
from ullage.memory.overhead import outside_allocator
from ullage.memory.program import Sequence, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import BATCH, SEQ, Dim, Graph

FSDP = ("fsdp1", "fsdp2")
SHARD_FILE_BYTES = 50 * 10**9
"""Largest file that save_pretrained writes (transformers modeling_utils.py, max_shard_size), whose tensors are bytes on the host at once
(safetensors torch.py, ``_flatten``)."""


@frozen
class Moment:
    """name: loading | routing p90 | routing p99 | evaluation | saving.

    allocated_bytes: of the rank that holds most. host_bytes: of the node that needs most.
    kept_bytes: what each further evaluation batch leaves on the device; most_batches: with how many it ends, None where none is kept.
    verdict: of the rank's card; of the host's memory where the job says how much there is, whichever is worse.
    """

    name: str
    rank: int
    allocated_bytes: int
    host_bytes: int
    verdict: Verdict
    what: str
    kept_bytes: int = 0
    most_batches: int | None = None


def moments(answer: Estimate) -> tuple[Moment, ...]:
    """In the order of a run. None of a traced module, of which only the step is known."""
    job = answer.job
    if job.stack == "traced":
        return ()
    graph = graph_of(job)
    on_ranks = [_Rank(job, graph, rank) for rank in ranks_of(job, graph)]
    return (_loading(on_ranks), *_routing(on_ranks), _evaluation(on_ranks), _saving(on_ranks))


class _Rank:
    def __init__(self, job: Job, graph: Graph, rank: Rank) -> None:
        self.job, self.graph, self.rank = job, graph, rank
        self.account: Account = account(job, graph, rank)

    @property
    def units(self) -> list[Unit]:
        """FSDP's."""
        found = []
        for chunk in self.rank.chunks:
            units = units_of(self.job, self.graph, self.rank, chunk)
            found += [*units.of.values(), *([units.root] if units.root is not None else [])]
        return found

    @property
    def parameter_bytes(self) -> int:
        """Of the parameters here as the model was loaded, before an engine shards them."""
        dtype = types_of(self.job).original if self.job.engine.name in FSDP else self.job.precision.params
        return sum(dtypes.size_bytes(param.numel, dtype) * param.copies for param in self.rank.params)

    @property
    def state_bytes(self) -> int:
        """What a checkpoint of this rank's own part holds."""
        kinds = ("parameters", "buffers", "optimizer")
        return sum(item.bytes * count for item, count in self.account.static if item.category in kinds)

    def verdict(self, allocated_bytes: int, host_bytes: int) -> Verdict:
        cluster = self.job.cluster
        if over_host(self.job, host_bytes):
            return "oom"
        outside = outside_allocator(cluster, self.account.groups, eager=self.account.eager)
        return verdict_of(interval(self.job, self.account, allocated_bytes, outside), cluster.device.capacity_bytes)


def _worst(name: str, found: list[tuple[_Rank, int]], host_bytes: int, what: str) -> Moment:
    rank, allocated = max(found, key=lambda one: one[1])
    each = rank.job.layout.world // rank.job.layout.pp
    return Moment(
        name=name,
        rank=rank.rank.index * each,
        allocated_bytes=allocated,
        host_bytes=host_bytes,
        verdict=rank.verdict(allocated, host_bytes),
        what=what,
    )


# -- loading


def _loading(ranks: list[_Rank]) -> Moment:
    job = ranks[0].job
    found = [(one, one.account.loading.peak_bytes + _whole_at_load(one)) for one in ranks]
    copies, what = _loaded_on_host(job)
    whole = copies * max(one.parameter_bytes for one in ranks)
    local = min(job.cluster.gpus_per_node, job.layout.world)
    return _worst("loading", found, whole + local * max(one.account.host_at_load_bytes for one in ranks), what)


def _loaded_on_host(job: Job) -> tuple[int, str]:
    """Whole copies of the weights on a node's host, and how they come to be there.

    Sources: transformers modeling_utils.py (from_pretrained; of FSDP local_torch_dtype and is_local_dist_rank_0; of ZeRO-3 of 5.24: other
    ranks than the first read meta tensors, and those before read the same mapped files), accelerate utils/fsdp_utils.py
    (fsdp2_load_full_state_dict), torchtitan train.py (a model on meta, its shards made where they stay).
    """
    if job.stack not in OF_TRANSFORMERS:
        return 0, "each rank makes its own part where it stays; a checkpoint is read part by part"
    is_packed = job.lora is not None and job.lora.base != "bf16"
    partitions = job.engine.name == "deepspeed" and job.engine.zero_stage == 3 and not is_packed
    if job.engine.name in FSDP or partitions:
        return 1, "one rank reads all weights on the host and sends them to the others, which keep their shards"
    local = min(job.cluster.gpus_per_node, job.layout.world)
    return local, "every rank reads all weights on the host, and moves them"


def _whole_at_load(one: _Rank) -> int:
    """What is whole for a moment beside the shards: FSDP1 moves a module's parameters and joins them (_init_utils.py), accelerate's FSDP2
    distributes parameter by parameter."""
    job = one.job
    if job.engine.name not in FSDP or job.stack not in OF_TRANSFORMERS or job.layout.world == 1:
        return 0
    dtype = types_of(job).original
    if job.engine.name == "fsdp1":
        return 2 * max(_whole_bytes(unit, dtype) for unit in one.units)
    return _largest_parameter(one, dtype)


def _whole_bytes(unit: Unit, dtype: str) -> int:
    return sum(dtypes.size_bytes(shape.whole, shape.original or dtype) for shape in unit.shapes)


def _largest_parameter(one: _Rank, dtype: str) -> int:
    return max(round_up(dtypes.size_bytes(param.numel, dtype)) for param in one.rank.params)


# -- routing


def _routing(ranks: list[_Rank]) -> Iterator[Moment]:
    """Of dropless experts on several ranks alone."""
    job, graph = ranks[0].job, ranks[0].graph
    if not routing.is_uneven(job, graph):
        return
    for quantile in routing.QUANTILES:
        found = [(one, routing.peak_bytes(job, graph, one.rank, quantile)) for one in ranks]
        share = f"{100 * (1 - quantile):.0f} %"
        yield _worst(
            f"routing p{100 * quantile:.0f}",
            found,
            0,
            f"a step on the rank whose experts are the busiest; {share} of steps are routed less evenly (loads: {routing.provenance()})",
        )


# -- evaluation


def _evaluation(ranks: list[_Rank]) -> Moment:
    """A forward without gradients beside the states. transformers' Trainer gathers every rank's logits and keeps them on the device until
    the end (trainer.py, evaluation_loop: eval_accumulation_steps is off by default) where metrics are computed of them. Each batch's are
    joined with all before in a new tensor (trainer_pt_utils.py, EvalLoopContainer): twice as much is there at the end of a batch."""
    job = ranks[0].job
    context = context_of(job, ranks[0].graph)
    found = [(one, one.account.static_bytes + _forward_bytes(one, context)) for one in ranks]
    if job.stack not in OF_TRANSFORMERS:
        return _worst("evaluation", found, 0, "a forward without gradients; no logits are kept")
    logits = context.buffer("logits", _logits(ranks[0].graph), _logits_type(job, context))
    kept = round_up(logits.bytes * context.tp) * job.layout.dp
    one, allocated = max(found, key=lambda pair: pair[1])
    outside = outside_allocator(job.cluster, one.account.groups, eager=one.account.eager)
    capacity = job.cluster.device.capacity_bytes - sum(part.bytes for part in outside)
    in_a_forward = (capacity - allocated) // kept
    room = capacity - one.account.static_bytes
    joined = max(room // (2 * kept), min(room // kept, 1))  # the first batch is joined with none
    moment = _worst(
        "evaluation",
        found,
        0,
        "a forward without gradients; where metrics want the logits, those of each batch of every rank stay, and are joined anew",
    )
    return replace(moment, kept_bytes=kept, most_batches=max(0, min(in_a_forward, joined)))


def _logits(graph: Graph) -> tuple[Dim, ...]:
    """Their dimensions: of each token, or of a head of whole sequences."""
    made = (one for op in graph.runs[-1].block.ops for one in op.outputs if one.name == "logits")
    return next((one.dims for one in made), (BATCH, SEQ, "vocab"))


def _logits_type(job: Job, context: Context) -> str:
    """accelerate copies what a model returns to fp32 under mixed precision (convert_outputs_to_fp32)."""
    return "fp32" if job.precision.autocast or job.precision.params == "fp32" else context.compute


def _forward_bytes(one: _Rank, context: Context) -> int:
    """The highest point of a forward that keeps nothing: of its chunks' blocks one by one."""
    replayer = Replayer(context=context, recompute=replace(one.job.recompute, kind="none"))
    gathered = [sum(item.bytes for item in unit.gathered) for unit in one.units] if one.job.engine.name in FSDP else [0]
    most = 0
    for chunk in one.rank.chunks:
        elements = [replace(element, mode=NO_GRAD) for element in replayer.elements(chunk)]
        most = max(most, Sequence([chunks.forward(elements, replayer, Wrap(), GradRule())]).peak_bytes)
    return most + sum(sorted(gathered)[-2:])


# -- saving


def _saving(ranks: list[_Rank]) -> Moment:
    """A gathered state dict on rank 0's host.

    Sources: torch distributed/fsdp/_state_dict_utils.py (FULL_STATE_DICT: a unit whole in its own type, copied to the host), checkpoint/
    state_dict.py (FSDP2: parameter by parameter); deepspeed runtime/engine.py (_zero3_consolidated_16bit_state_dict: module by module);
    Megatron's distributed checkpoint: each rank copies its own part.
    """
    job = ranks[0].job
    static = [one.account.static_bytes for one in ranks]
    extra, host = [0] * len(ranks), max(one.parameter_bytes for one in ranks)
    what = "rank 0 copies its parameters to the host, file by file"
    local = min(job.cluster.gpus_per_node, job.layout.world)
    if job.engine.name in FSDP and job.stack == "torchtitan":
        host = local * max(one.state_bytes for one in ranks)
        what = "each rank writes its own part; all of it is on the host at once where saving is asynchronous"
    elif job.engine.name in FSDP:
        dtype = types_of(job).original
        flat = job.engine.name == "fsdp1"
        extra = [
            max(_whole_bytes(unit, dtype) for unit in one.units) if flat else _largest_parameter(one, dtype)
            for one in ranks
        ]
        states = sum(item.bytes * count for item, count in ranks[0].account.static if item.category == "optimizer")
        host += states * max(shape.shards for unit in ranks[0].units for shape in unit.shapes)
        what = "parameters and optimizer states, gathered one by one, whole on rank 0's host"
    elif job.engine.name == "deepspeed" and job.engine.zero_stage == 3:
        extra = [_largest_parameter(one, job.precision.params) for one in ranks]
        what = "parameters gathered one by one in 16 bits, whole on rank 0's host (stage3_gather_16bit_weights_on_model_save)"
    elif job.engine.name == "megatron":
        host = local * max(one.state_bytes for one in ranks)
        what = "a distributed checkpoint: each rank's own part copied to the host"
    else:
        host = min(host, SHARD_FILE_BYTES)
    found = [(one, size + more) for one, size, more in zip(ranks, static, extra, strict=True)]
    return _worst("saving", found, host, what)
