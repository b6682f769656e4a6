"""What a plain training loop keeps on one device: runtime torch, no wrapper."""

from __future__ import annotations

from ullage.engines.base import Account
from ullage.engines.replica import plain, refuse
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    refuse(job)
    if job.layout.world > 1:
        raise Unsupported(
            "runs on one device", key="engine.name", value="single", remedy="name ddp, fsdp2 or deepspeed"
        )
    return plain(job, graph, rank)
