"""What a layer's forward leaves, of any stack."""

from __future__ import annotations

from ullage.engines.base import context_of
from ullage.job.adapted import graph_of
from ullage.job.job import Job
from ullage.kernels.stacks import lower
from ullage.memory.block import BlockSteps
from ullage.memory.block_replay import BlockReplay


def layer_keeps(job: Job) -> int:
    """Bytes that the forward of a layer in the middle leaves beyond the stream."""
    model = graph_of(job)
    block = [run.block for run in model.runs if run.block.role == "layer"][-1]
    context = context_of(job, model)
    stream = context.buffer("x", block.input.dims).bytes
    steps = BlockSteps(
        steps=lower(block, context), input=block.input.name, input_bytes=stream, output=block.output.name
    )
    return BlockReplay(steps).run().forward.delta_bytes
