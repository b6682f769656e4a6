"""What FSDP2 keeps on one rank, and when. Closed forms and traces behind it: docs/architecture.md."""

from __future__ import annotations

from dataclasses import replace

from ullage.engines import offloaded
from ullage.engines.base import Account, context_of
from ullage.engines.fsdp2 import captured
from ullage.engines.fsdp2.flat import as_autograd_sees
from ullage.engines.fsdp2.pipelined import PipelinedStep, receive_buffers
from ullage.engines.fsdp2.policy import units_of, unwrapped
from ullage.engines.fsdp2.states import beside, host_bytes, packed, pinned_shards, states
from ullage.engines.fsdp2.step import Step
from ullage.engines.recompute import stops_early
from ullage.engines.replica import plain
from ullage.frozen import FrozenMap
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory.borders import stages_of
from ullage.memory.chunk import Replayer
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    offloaded.refuse(job)
    job = captured.as_run(job)
    alone = unwrapped(job)
    if alone is not None:
        return replace(plain(alone, graph, rank), groups=_groups(job))
    rank = as_autograd_sees(job, rank)
    context = _context(job, graph)
    replayer = Replayer(
        context=context,
        recompute=job.recompute,
        early_stop=stops_early(job, context),
        inputs=offloaded.inputs(job),
    )
    units = [units_of(job, graph, rank, part) for part in rank.chunks]
    stages = stages_of(graph, job.layout, rank, context)
    static = [
        *states(job, rank, units),
        *packed(job, rank),
        *beside(job, context, _rotary_dim(graph)),
        *receive_buffers(job, stages),
    ]
    kind = PipelinedStep if job.layout.pp > 1 else Step
    step = kind(job=job, graph=graph, rank=rank, replayer=replayer, units=units, stages=stages)
    program = step.program()
    return Account(
        static=tuple((item, count) for item, count in static if item.bytes and count),
        step=captured.placed(job, graph, program) if captured.is_captured(job) else program,
        late=tuple(item for item, _ in static if item.category == "optimizer"),
        host_bytes=host_bytes(job, rank, units) + step.host_bytes,
        host_at_load_bytes=pinned_shards(job, rank, units),
        groups=_groups(job),
    )


def _context(job: Job, graph: Graph) -> Context:
    """The kernels' view; 8-bit compute without a recipe is torchao's default, tensorwise scaling."""
    context = context_of(job, graph)
    if job.precision.compute != "fp8" or "float8_recipe" in context.options:
        return context
    return replace(context, options=FrozenMap({**context.options, "float8_recipe": "tensorwise"}))


def _rotary_dim(graph: Graph) -> int:
    for name in ("rope_dim", "head_dim"):
        if name in graph.sizes:
            return graph.size(name)
    return 0


def _groups(job: Job) -> tuple[tuple[str, int, int], ...]:
    """(name, ranks, nodes crossed) of the groups that communicate; ranks of a node are neighbours in tp, then cp, then dp, then pp."""
    layout = job.layout
    shard = job.engine.shard_group or layout.dp * layout.cp
    per_node = job.cluster.gpus_per_node
    sizes = {
        "world": (layout.world, layout.world),
        "dp_shard": (shard, layout.tp * shard),
        "dp_replicate": (layout.dp * layout.cp // shard, layout.tp * layout.dp * layout.cp),
        "tp": (layout.tp, layout.tp),
        "pp": (layout.pp, layout.world),
        "cp": (layout.cp, layout.tp * layout.cp),
        "ep": (layout.ep, layout.tp * layout.ep),
    }
    return tuple((name, size, -(-span // per_node)) for name, (size, span) in sizes.items() if size > 1)
