"""What Megatron-Core keeps on one rank, and when.

Sources: megatron/core/distributed/param_and_grad_buffer.py (buffers), megatron/core/optimizer (main parameters, moments),
megatron/core/pipeline_parallel/schedules.py (what is freed after a send), TransformerEngine pytorch/module/base.py (workspaces).
"""

from __future__ import annotations

from dataclasses import replace

from ullage.engines.base import Account, context_of, flag, pinned, shard, sized
from ullage.engines.megatron import hybrid, narrow, offloaded, stowed
from ullage.engines.megatron.buffers import buffers, dummy_gradients, workspaces
from ullage.engines.megatron.fsdp import GRADIENTS_SHARDED, ShardedBlocks, shards
from ullage.engines.megatron.graphs import capture, layers_in_flight, static_buffers, warms_up, without_graphs
from ullage.engines.megatron.states import frozen_parameters, gradients_type, load, states, trained, trained_tensors
from ullage.engines.pipeline import scheduled
from ullage.errors import Unsupported
from ullage.job.job import Job
from ullage.kernels import stacks
from ullage.kernels.megatron_offload import one_layer_bytes, sent
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule, boundary, boundary_grad
from ullage.memory.chunk import Element, Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free, round_up
from ullage.memory.rank import Chunk, Rank
from ullage.model.graph import STREAM, Block, Graph
from ullage.schedule.base import Kind


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    offloaded.refuse(job, graph.layers)
    hybrid.refuse(job)
    stowed.refuse(job)
    context = context_of(job, graph)
    fused = flag(job.engine.options, "gradient_accumulation_fusion", True)
    replayer = Replayer(
        context=context,
        recompute=job.recompute,
        early_stop=False,
        reentrant=True,
        group=recompute_group(job),
    )
    rule = GradRule(mode="fused" if fused else "add")
    kept = states(job, rank)
    dummies = dummy_gradients(rank, context) if fused else []
    others = [
        *frozen_parameters(job, rank),
        *buffers(job, context),
        *narrow.weights(job, rank),
        *workspaces(job, rank),
        *static_buffers(job, rank, replayer),
    ]
    static = [*(item for one in kept for item in one.all), *dummies, *others]
    captured = capture(job, rank, replayer)
    warm = captured is not None and warms_up(job)
    return Account(
        static=tuple((item, 1) for item in static if item.bytes),
        late=() if warm else (*dummies, *(item for one in kept for item in one.late)),
        load=None if warm else load(kept, others),
        first=captured,
        before=without_graphs(job) if warm else None,
        step=_step(job, rank, replayer, rule),
        host_bytes=_host_bytes(job, rank, replayer) + _states_on_host(job, rank),
        groups=_groups(job),
    )


def _stepped(job: Job, rank: Rank) -> list[tuple[list[int], tuple[int, ...]]]:
    """Of each of Megatron's optimizers (dense parameters', experts'): elements of the rank's parameters, and of its pieces of them."""
    both = ((expert, trained_tensors(rank, expert=expert)) for expert in (False, True))
    return [(tensors, shard(tensors, shards(job, expert))) for expert, tensors in both if tensors]


def _states_on_host(job: Job, rank: Rank) -> int:
    return sum(
        hybrid.host_bytes(job, tensors, pieces) + stowed.host_bytes(job, pieces)
        for tensors, pieces in _stepped(job, rank)
    )


def _host_bytes(job: Job, rank: Rank, replayer: Replayer) -> int:
    """Of one rank, page-locked: of layers offloaded whole; of fine-grained offloading, of each layer that is in flight (OffloadTensorPool
    keeps a buffer for each tensor that is away at once; one layer's never leave, and are counted all the same)."""
    count = offloaded.layers_of(job)
    if count:
        return offloaded.host_bytes(_offloaded_block(rank), replayer, count)
    if not replayer.context.option("fine_grained_activation_offloading"):
        return 0
    blocks = {run.block for part in rank.chunks for run in part.runs if run.block.role == "layer"}
    found = 0
    for block in blocks:
        layer = sum(pinned(n_bytes) for n_bytes in sent(stacks.lower(block, replayer.context)))
        found += layer * layers_in_flight(job, rank, {block})
    return found


def _offloaded_block(rank: Rank) -> Block:
    """The one kind of layer that a model has whose layers are offloaded whole."""
    blocks = {run.block for part in rank.chunks for run in part.runs if run.block.role == "layer"}
    if len(blocks) > 1:
        what = "is modelled for layers of one kind, and the model has " + ", ".join(sorted(one.name for one in blocks))
        raise Unsupported(what, key=f"engine.options.{offloaded.LAYERS}")
    (block,) = blocks
    return block


def recompute_group(job: Job) -> int:
    """Layers under one checkpoint."""
    if job.engine.options.get("recompute_method") == "uniform":
        layers = job.engine.options.get("recompute_num_layers", 1)
        return layers if isinstance(layers, int) else 1
    return 1


def _step(job: Job, rank: Rank, replayer: Replayer, rule: GradRule) -> Node:
    wrap = ShardedBlocks(job, rank) if job.engine.zero_stage >= GRADIENTS_SHARDED else Wrap()
    away = offloaded.layers_of(job)
    if away:
        wrap = offloaded.OffloadedLayers(offloaded.stash(_offloaded_block(rank), replayer), wrap)

    def elements(part: Chunk) -> list[Element]:
        return offloaded.marked(replayer.elements(part), away)

    stream = replayer.context.buffer("stream", STREAM)
    received, sent_grad = boundary(stream.bytes), boundary_grad(stream.bytes)
    loss, loss_grad = boundary(4), boundary_grad(4)
    halved = replace(rule, halves="matmuls")

    def forward(index: int) -> Node:
        part = rank.chunks[index]
        inner = chunks.forward(elements(part), replayer, wrap, rule)
        before = [] if part.first else [alloc(received)]
        after = [] if part.last else [free(received)]  # sent on, then cut to one element (deallocate_output_tensor)
        return Sequence([*before, inner, *after])

    def backward(index: int, rule: GradRule) -> Node:
        part = rank.chunks[index]
        inner = chunks.backward(elements(part), replayer, wrap, rule)
        before = [free(loss), alloc(loss_grad)] if part.last else [alloc(sent_grad)]
        after = [] if part.first else [free(sent_grad)]
        return Sequence([*before, inner, *after])

    def program(kind: Kind, index: int) -> Node:
        if kind == "W":
            return chunks.weights(replayer.elements(rank.chunks[index]), replayer, halved)
        return forward(index) if kind == "F" else backward(index, halved if kind == "I" else rule)

    passes = scheduled(job, rank.index, program)
    if not rank.first and len(rank.chunks) == 1 and job.data.grad_accum > 1:
        # schedules.py names the gradient that it sent until the next backward has made its own
        held = boundary_grad(stream.bytes)
        passes = Sequence([alloc(held), passes, free(held)])
    ahead = _fetched_ahead(replayer, rank)
    fetched = stowed.window(job, [pieces for _, pieces in _stepped(job, rank)])
    update = _optimizer(job, rank)
    if fetched:
        update = Sequence([*map(alloc, fetched), update, *map(free, fetched)], "optimizer step")
    return Sequence([*(alloc(item) for item in ahead), passes, *(free(item) for item in ahead), update])


def _fetched_ahead(replayer: Replayer, rank: Rank) -> list[Item]:
    """With fine-grained offloading one layer's tensors are on the device ahead of its backward; the last layer's never leave."""
    if not replayer.context.option("fine_grained_activation_offloading"):
        return []
    blocks = {run.block for part in rank.chunks for run in part.runs if run.block.role == "layer"}
    largest = max((one_layer_bytes(stacks.lower(block, replayer.context)) for block in blocks), default=0)
    return [
        Item(
            category="activations",
            what="offloaded activations of one layer, fetched ahead",
            bytes=round_up(largest),
            formula="the offload margin of core/pipeline_parallel/fine_grained_activation_offload.py: one layer's groups",
            lives="from one layer's backward to the next",
        )
    ]


def _optimizer(job: Job, rank: Rank) -> Node:
    """FusedAdam has no temporaries; gradients that are not fp32 are first copied into fp32 main gradients."""
    if hybrid.is_used(job) and hybrid.is_aware(job):
        return Sequence([hybrid.step(job, pieces) for _, pieces in _stepped(job, rank)], "optimizer step")
    if gradients_type(job) == "fp32" or job.precision.master != "fp32":
        return Sequence([], "optimizer step")
    copies = [
        sized(
            "gradients",
            f"fp32 copy of the gradients ({'experts' if expert else 'dense'})",
            trained(rank, expert=expert),
            "fp32",
            shards=shards(job, expert),
            lives="optimizer step until zero_grad",
        )
        for expert in (False, True)
        if trained(rank, expert=expert)
    ]
    return Sequence([*(alloc(item) for item in copies), *(free(item) for item in copies)], "optimizer step")


def _groups(job: Job) -> tuple[tuple[str, int, int], ...]:
    """Process groups by name, size and nodes crossed. Megatron lays out tp fastest, then cp, dp, pp."""
    layout = job.layout
    node = job.cluster.scale_up_gpus
    inner = layout.tp * layout.cp
    groups = {
        "tp": (layout.tp, layout.tp),
        "cp": (layout.cp, inner),
        "dp": (layout.dp * layout.cp, inner * layout.dp),
        "ep": (layout.ep, inner * layout.dp),
        "pp": (layout.pp, layout.world),
    }
    return tuple((name, size, -(-reach // node)) for name, (size, reach) in groups.items() if size > 1)
