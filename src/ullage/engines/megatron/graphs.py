"""What CUDA graphs cost a Megatron rank: static inputs and outputs for the whole run, and the capture in the first step."""

from __future__ import annotations

from ullage.job.job import Job
from ullage.kernels import megatron
from ullage.kernels.megatron_graphs import captured, captures_attention
from ullage.memory.block import BlockSteps, GradRule, boundary, boundary_grad
from ullage.memory.block_replay import BlockReplay
from ullage.memory.chunk import Replayer
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, free, on_stream, round_up
from ullage.memory.rank import Rank
from ullage.schedule import actions, in_flight

STATIC_TENSORS = 4
"""Input, output, and the gradient of each (TransformerEngine pytorch/graph.py), where graphs share no buffers
(``_reuse_graph_input_output_buffers``, ``cuda_graph_share_io_buffers``)."""
POOL_STREAM = 7  # a stream of its own in the simulation: the graphs' pool serves nothing else


def static_buffers(job: Job, rank: Rank, replayer: Replayer) -> list[Item]:
    """One set of static tensors for each layer and micro-batch: each has a graph."""
    if not captures_attention(replayer.context):
        return []
    layers = sum(part.layers for part in rank.chunks)
    graphs = layers * job.data.grad_accum
    one = _stream_bytes(rank, replayer)
    return [
        Item(
            category="buffers",
            what="static inputs, outputs and gradients of CUDA graphs",
            bytes=graphs * STATIC_TENSORS * round_up(one),
            pieces=(round_up(one),) * (graphs * STATIC_TENSORS),
            formula=f"{layers} layers x {job.data.grad_accum} micro-batches x {STATIC_TENSORS} x {one} B",
            lives="from capture on",
        )
    ]


def capture(job: Job, rank: Rank, replayer: Replayer) -> Node | None:
    """All graphs are captured in the first step in the schedule's order, so that as much is in flight as in training."""
    if not captures_attention(replayer.context):
        return None
    block = next(run.block for part in rank.chunks for run in part.runs if run.block.role == "layer")
    part = captured(megatron.eager_steps(block, replayer.context))
    size = _stream_bytes(rank, replayer)
    steps = BlockSteps(steps=part, input=block.input.name, input_bytes=size, output=part[-1].writes[0].name)
    program = BlockReplay(steps, grad_rule=GradRule(mode="fused")).run()
    layout = job.layout
    plan = actions(
        layout.schedule if layout.pp > 1 else "1f1b",
        stages=layout.pp,
        rank=rank.index,
        micro_batches=job.data.grad_accum,
        chunks=layout.vpp,
    )
    layers = max(part.layers for part in rank.chunks) * in_flight(plan)
    node = Sequence(
        [
            alloc(boundary(size)),
            Repeat(layers, program.forward),
            free(boundary(size)),
            alloc(boundary_grad(size)),
            Repeat(layers, program.backward),
            free(boundary_grad(size)),
        ],
        "capture of the CUDA graphs, first step",
    )
    return on_stream(node, POOL_STREAM)


def _stream_bytes(rank: Rank, replayer: Replayer) -> int:
    block = next(run.block for part in rank.chunks for run in part.runs if run.block.role == "layer")
    return replayer.context.tensor(block.input).bytes
