"""Adapters inside FSDP1's flat parameters: what is frozen there has gradients all the same.

With ``use_orig_params`` the layer code sees views of one flat parameter for each wrapped module, which asks for a gradient where any of its
parts does (torch distributed/fsdp/_flat_param.py, _use_unsharded_views): autograd makes the gradients of all parts, and joins them. The
optimizer is given the trained parts alone.
"""

from __future__ import annotations

from ullage.engines.fsdp2.policy import wraps_adapters
from ullage.frozen import replace
from ullage.job.job import Job
from ullage.memory.rank import Rank
from ullage.model.graph import Block


def as_autograd_sees(job: Job, rank: Rank) -> Rank:
    """The rank; where adapters are no units of their own, its blocks of which a part is trained ask for the gradient of every parameter."""
    if job.lora is None or job.engine.name != "fsdp1" or wraps_adapters(job):
        return rank
    chunks = tuple(
        replace(chunk, runs=tuple(replace(run, block=_whole(run.block)) for run in chunk.runs)) for chunk in rank.chunks
    )
    params = tuple(
        replace(local, block=_whole(local.block), param=replace(local.param, trainable=_trains(local.block)))
        for local in rank.params
    )
    return replace(rank, chunks=chunks, params=params)


def _trains(block: Block) -> bool:
    return any(param.trainable for param in block.params)


def _whole(block: Block) -> Block:
    if not _trains(block):
        return block
    ops = tuple(
        replace(op, params=tuple(replace(param, trainable=True) for param in op.params)) if op.params else op
        for op in block.ops
    )
    return replace(block, ops=ops)
