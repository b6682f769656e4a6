"""What a plain training loop keeps on one device, or on several that hold a part of the model each: runtime torch, no wrapper.

device_map (accelerate, big_modeling.py ``dispatch_model``): one process, its layers on several devices one after the other, one
micro-batch at a time. Each layer's hook moves its input to its own device; the model's moves what it returns, logits too, to where its
input came from (hooks.py, AlignDevicesHook: io_same_device).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.engines.base import Account, context_of
from ullage.engines.replica import plain, refuse
from ullage.frozen import FrozenMap
from ullage.job.job import Job
from ullage.kernels.transformers_loss import logits_type
from ullage.memory.program import Item, Sequence, alloc, free, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import BATCH, SEQ, Graph


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    refuse(job)
    if job.layout.pp == 1:
        return plain(job, graph, rank)
    returned = _returned(job, graph) if rank.chunks[0].first else []
    where_it_ends = Sequence([*(alloc(item) for item in returned), *(free(item) for item in returned)])
    return plain(_converting_elsewhere(job), graph, rank, where_it_ends)


def _converting_elsewhere(job: Job) -> Job:
    """accelerate's copy of the outputs to fp32 is made where they are moved to."""
    options = FrozenMap({**job.engine.options, "convert_outputs_to_fp32": False})
    return replace(job, engine=replace(job.engine, options=options))


def _returned(job: Job, graph: Graph) -> list[Item]:
    """The logits on the first device, and under autocast their copy in fp32."""
    context = context_of(job, graph)
    own = logits_type(context)
    types = [own] if own == "fp32" or not context.autocast else [own, "fp32"]
    found = []
    for dtype in types:
        logits = context.buffer(
            "logits", (BATCH, SEQ, "vocab"), dtype, "logits that the model returns, moved to the first device"
        )
        found.append(
            Item(
                category="activations",
                what=logits.what,
                bytes=round_up(logits.bytes),
                formula=logits.formula,
                lives="the end of the forward",
            )
        )
    return found
