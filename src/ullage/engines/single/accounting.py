"""What a plain training loop keeps on one device: runtime torch, no wrapper. Gradients accumulate in ``.grad`` until zero_grad."""

from __future__ import annotations

from ullage.engines import optimizer as optimizers
from ullage.engines.base import Account, context_of
from ullage.engines.replica import (
    ReplicaStep,
    beside,
    keep,
    master,
    parameters,
    refuse,
    replayer_of,
    states,
    steps_in_backward,
)
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.memory.block import GradRule
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    refuse(job)
    context = context_of(job, graph)
    if job.layout.world > 1:
        raise Unsupported(
            "runs on one device", key="engine.name", value="single", remedy="name ddp, fsdp2 or deepspeed"
        )
    groups = optimizers.stepped(rank, context, job.precision.master or job.precision.params)
    moments = states(job, groups)
    on_host = job.offload.optimizer != "none"
    held = [parameters(rank, job.precision.params), *master(job, rank), *beside(job, context)]
    in_backward = GradRule(mode="add", temporaries=optimizers.temporaries(job.optimizer))
    step = ReplicaStep(
        job=job,
        graph=graph,
        rank=rank,
        replayer=replayer_of(job, graph),
        groups=groups,
        rules=(lambda _micro_batch: in_backward) if steps_in_backward(job) else keep,
    )
    return Account(
        static=(*((item, 1) for item in held if item.bytes), *(() if on_host else moments)),
        step=step.program(),
        late=() if on_host else tuple(item for item, _ in moments),
        host_bytes=sum(item.bytes * count for item, count in moments) if on_host else 0,
    )
