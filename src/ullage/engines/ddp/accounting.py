"""What DistributedDataParallel keeps on one rank, and when; with ``zero1`` the optimizer is ZeroRedundancyOptimizer.

``gradient_as_bucket_view`` (off by default): ``.grad`` is a view of its bucket, so a gradient goes once it has been copied there.
Accumulation runs its first micro-batches under no_sync: those gradients are ordinary tensors (zero_grad sets them to None), views or
not, and the last backward adds to them before it puts the sum into the bucket.

``reduce_in_place`` (ullage's own trainer): there are no buckets, and gradients are those of one device (in_place.py).
"""

from __future__ import annotations

from ullage.engines import optimizer as optimizers
from ullage.engines.base import Account, context_of, flag
from ullage.engines.ddp.buckets import buckets
from ullage.engines.ddp.in_place import PutTogether
from ullage.engines.ddp.partition import fullest
from ullage.engines.replica import ReplicaStep, beside, held_parameters, keep, master, refuse, replayer_of, states
from ullage.job.job import Job
from ullage.memory.block import GradRule
from ullage.memory.program import Node, Sequence, free
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    refuse(job)
    context = context_of(job, graph)
    whole = optimizers.stepped(rank, context, job.precision.master or job.precision.params)
    groups = fullest(whole, job.layout.dp) if job.engine.name == "zero1" else whole
    moments = states(job, groups)
    reducer = [] if _in_place(job) else buckets(job, rank)
    held = [*held_parameters(job, rank), *master(job, rank), *reducer, *beside(job, context)]
    step = _step(job, graph, rank, groups)
    return Account(
        static=(*((item, 1) for item in held if item.bytes), *moments),
        step=step.program(),
        late=tuple(item for item, _ in moments),
        host_bytes=step.host_bytes,
        groups=(("dp", job.layout.dp, job.cluster.nodes),) if job.layout.dp > 1 else (),
    )


def _step(job: Job, graph: Graph, rank: Rank, groups: tuple[optimizers.Group, ...]) -> ReplicaStep:
    views = flag(job.engine.options, "gradient_as_bucket_view", False)
    step = ReplicaStep(job=job, graph=graph, rank=rank, replayer=replayer_of(job, graph), groups=groups)
    last = job.data.grad_accum - 1
    if _in_place(job):
        first = {last: first for first, last in reversed(step.tied.items())}
        tied = frozenset({*step.tied, *first} - set(first.values()))  # whole with the first block's
        step.around = lambda wrap, micro_batch: PutTogether(wrap, tied) if micro_batch == last else wrap
    if not views:
        return step

    def into_buckets(micro_batch: int) -> GradRule:
        return GradRule(mode="add") if micro_batch == last else keep(micro_batch)

    def after(micro_batch: int) -> Node:
        """The sum of earlier micro-batches is in the buckets now."""
        if last == 0 or micro_batch != last:
            return Sequence([])
        return Sequence([free(item, count) for item, count in step.gradients()])

    step.rules, step.after_backward, step.keeps = into_buckets, after, False
    return step


def _in_place(job: Job) -> bool:
    return flag(job.engine.options, "reduce_in_place", False)
