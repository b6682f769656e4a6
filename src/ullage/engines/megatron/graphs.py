"""What CUDA graphs cost a Megatron rank: static inputs from their capture on, and the capture, after a few steps without them.

A layer has a graph for each micro-batch of the pipeline (for one where there is none). Those whose lives do not meet share: an input whose
backward has run serves the next forward, outputs go back to the graphs' pool once their backward is captured, and one gradient serves
all. Sources: megatron/core/transformer/cuda_graphs.py (_get_sample_arguments), transformer_layer.py (get_layer_static_inputs),
TransformerEngine pytorch/graph.py (_reuse_graph_input_output_buffers, which Megatron-Core sets from Transformer Engine 2.7 on).
"""

from __future__ import annotations

from collections.abc import Collection

from ullage.engines.pipeline import actions_of
from ullage.frozen import FrozenMap, replace
from ullage.job.job import Job
from ullage.kernels import megatron
from ullage.kernels.megatron_graphs import captured, captures
from ullage.kernels.step import Step
from ullage.memory.block import BlockProgram, BlockSteps, GradRule, boundary, boundary_grad
from ullage.memory.block_replay import BlockReplay
from ullage.memory.chunk import Replayer
from ullage.memory.program import Item, Node, Repeat, Sequence, alloc, free, on_stream, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import Block

STATIC_GRADIENTS = 2  # the output's gradient, one for all graphs, and the input's, until the next chunk's backward
POOL_STREAM = 7  # a stream of its own in the simulation: the graphs' pool serves nothing else


def static_buffers(job: Job, rank: Rank, replayer: Replayer) -> list[Item]:
    """An input for each layer in flight, an attention mask where it attends, and the gradients that all graphs share."""
    parts = _captured(rank, replayer)
    if not parts:
        return []
    data = job.data
    layers, masks = (
        layers_in_flight(job, rank, some) for some in (set(parts), {block for block in parts if _attends(block)})
    )
    stream = round_up(_stream_bytes(rank, replayer))
    mask = round_up(data.micro_batch * (data.seq_len // job.layout.cp) * data.seq_len)
    return [
        _static("inputs", layers, stream, f"{layers} layers in flight x {stream} B"),
        _static(
            "attention masks",
            masks,
            mask,
            f"{masks} layers in flight x micro-batch {data.micro_batch} x seq {data.seq_len}^2 / cp {job.layout.cp} x 1 B (bool)",
        ),
        _static("gradients", STATIC_GRADIENTS, stream, f"{STATIC_GRADIENTS} x {stream} B, shared by all graphs"),
    ]


def _attends(block: Block) -> bool:
    return any(op.kind == "attention" for op in block.ops)


def _captured(rank: Rank, replayer: Replayer) -> dict[Block, tuple[Step, ...]]:
    """What is captured of each kind of layer that has a graph."""
    context = replayer.context
    if not captures(context):
        return {}
    blocks = {run.block for part in rank.chunks for run in part.runs if run.block.role == "layer"}
    parts = {block: captured(megatron.eager_steps(block, context), context) for block in sorted(blocks, key=_name)}
    return {block: part for block, part in parts.items() if part}


def _static(what: str, count: int, each: int, formula: str) -> Item:
    return Item(
        category="buffers",
        what=f"static {what} of CUDA graphs",
        bytes=count * each,
        pieces=(each,) * count,
        formula=formula,
        lives="from capture on",
    )


def warms_up(job: Job) -> bool:
    """Whether the first steps run without graphs, which are then captured (training/training.py: cuda_graph_warmup_steps, 3 by default)."""
    return job.engine.options.get("cuda_graph_warmup_steps") != 0


def without_graphs(job: Job) -> Job:
    options = {name: value for name, value in job.engine.options.items() if name != "cuda_graph_impl"}
    return replace(job, engine=replace(job.engine, options=FrozenMap(options)))


def capture(job: Job, rank: Rank, replayer: Replayer) -> Node | None:
    """All graphs are captured at once in the schedule's order, so that as much is in flight as in training."""
    parts = _captured(rank, replayer)
    if not parts:
        return None
    size = _stream_bytes(rank, replayer)
    programs = [(layers_in_flight(job, rank, {block}), _program(block, part, size)) for block, part in parts.items()]
    node = Sequence(
        [
            alloc(boundary(size)),
            *(Repeat(layers, program.forward) for layers, program in programs),
            free(boundary(size)),
            alloc(boundary_grad(size)),
            *(Repeat(layers, program.backward) for layers, program in reversed(programs)),
            free(boundary_grad(size)),
        ],
        "capture of the CUDA graphs",
    )
    return on_stream(node, POOL_STREAM)


def _program(block: Block, part: tuple[Step, ...], size: int) -> BlockProgram:
    steps = BlockSteps(steps=part, input=block.input.name, input_bytes=size, output=part[-1].writes[0].name)
    return BlockReplay(steps, grad_rule=GradRule(mode="fused")).run()


def layers_in_flight(job: Job, rank: Rank, blocks: Collection[Block]) -> int:
    """The most of these layers at one time, counted once for each micro-batch, whose forward has run and whose backward has not."""
    live = most = 0
    for action in actions_of(job, rank.index):
        layers = sum(run.repeat for run in rank.chunks[action.chunk].runs if run.block in blocks)
        live += {"F": layers, "B": -layers, "I": -layers, "W": 0}[action.kind]
        most = max(most, live)
    return most


def _name(block: Block) -> str:
    return block.name


def _stream_bytes(rank: Rank, replayer: Replayer) -> int:
    block = next(run.block for part in rank.chunks for run in part.runs if run.block.role == "layer")
    return replayer.context.tensor(block.input).bytes
