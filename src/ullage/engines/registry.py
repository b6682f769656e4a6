"""Engines by name; each is loaded when a job first asks for it, so that a command pays for one."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module

from ullage.engines.base import Account, Accounting
from ullage.engines.reach import refuse_what_is_not_read
from ullage.errors import Infeasible, Unsupported
from ullage.job.job import Job, Layout
from ullage.memory.rank import Rank, ranks
from ullage.model.graph import Graph

ENGINES = {
    "single": "ullage.engines.single.accounting",
    "ddp": "ullage.engines.ddp.accounting",
    "zero1": "ullage.engines.ddp.accounting",
    "fsdp1": "ullage.engines.fsdp2.accounting",
    "fsdp2": "ullage.engines.fsdp2.accounting",
    "deepspeed": "ullage.engines.deepspeed.accounting",
    "megatron": "ullage.engines.megatron.accounting",
}


SPLITS = {"megatron": "ullage.engines.megatron.split", "deepspeed": "ullage.engines.deepspeed.split"}
"""Engines with a way of their own to cut layers into stages: ``layout(job, layers)``."""


def ranks_of(job: Job, graph: Graph) -> tuple[Rank, ...]:
    """The pipeline ranks of a job, cut as its engine cuts them."""
    if job.layout.pp > 1 and job.stack == "traced" and job.engine.name != "fsdp2":
        raise Unsupported(
            "runs a traced module under torch's own pipelining alone: what crosses its stages is more than the stream",
            key="layout.pp",
            value=job.layout.pp,
            remedy="name fsdp2; or shard its parameters (dp, ZeRO), or recompute",
        )
    if job.layout.pp > 1 and job.stack == "traced" and graph.layers < job.layout.pp * job.layout.vpp:
        raise Infeasible(
            f"the module has {graph.layers} layers, and each of {job.layout.pp * job.layout.vpp} stages needs one",
            key="layout.pp",
            value=job.layout.pp,
        )
    module = SPLITS.get(job.engine.name)
    layout: Layout = import_module(module).layout(job, graph.layers) if module and job.layout.pp > 1 else job.layout
    return ranks(graph, layout)


@lru_cache(maxsize=256)
def account(job: Job, graph: Graph, rank: Rank) -> Account:
    """The account of one pipeline rank under the job's engine."""
    module = ENGINES.get(job.engine.name)
    if module is None:
        raise Unsupported("is not modelled", key="engine.name", value=job.engine.name, allowed=", ".join(ENGINES))
    refuse_what_is_not_read(job)
    accounting: Accounting = import_module(module).account
    return accounting(job, graph, rank)
