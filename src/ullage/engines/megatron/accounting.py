"""What Megatron-Core keeps on one rank, and when.

Sources: megatron/core/distributed/param_and_grad_buffer.py (buffers), megatron/core/optimizer (main parameters, moments),
megatron/core/pipeline_parallel/schedules.py (what is freed after a send), TransformerEngine pytorch/module/base.py (workspaces).
"""

from __future__ import annotations

from ullage.engines.base import Account, context_of, flag, sized
from ullage.engines.pipeline import scheduled
from ullage.hardware import overheads
from ullage.job.job import Job
from ullage.kernels.step import Context
from ullage.memory import chunk as chunks
from ullage.memory.block import GradRule, boundary, boundary_grad
from ullage.memory.chunk import Replayer, Wrap
from ullage.memory.program import Item, Node, Sequence, alloc, free, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import BATCH, SEQ, STREAM, Graph


def account(job: Job, graph: Graph, rank: Rank) -> Account:
    context = context_of(job, graph)
    fused = flag(job.engine.options, "gradient_accumulation_fusion", True)
    replayer = Replayer(
        context=context,
        recompute=job.recompute,
        early_stop=False,
        group=_recompute_group(job),
    )
    rule = GradRule(mode="fused" if fused else "add")
    static = [
        *_states(job, rank),
        *_buffers(job, graph, rank, context, fused),
        *_workspaces(job, rank),
    ]
    return Account(
        static=tuple((item, 1) for item in static if item.bytes),
        step=_step(job, graph, rank, replayer, rule),
        groups=_groups(job),
    )


def _recompute_group(job: Job) -> int:
    if job.engine.options.get("recompute_method") == "uniform":
        layers = job.engine.options.get("recompute_num_layers", 1)
        return layers if isinstance(layers, int) else 1
    return 1


# -- states


def _states(job: Job, rank: Rank) -> list[Item]:
    """Parameters and main gradients whole; main parameters and moments over the data-parallel group with the distributed optimizer.

    Expert parameters have buffers and a data-parallel group of their own.
    """
    items: list[Item] = []
    for expert in (False, True):
        numel = rank.numel(expert=expert)
        if not numel:
            continue
        which = "experts" if expert else "dense"
        shards = _shards(job, expert)
        items.append(sized("parameters", f"parameters ({which})", numel, job.precision.params))
        items.append(sized("gradients", f"main gradients ({which})", numel, job.precision.grads, why="never sharded"))
        if job.precision.master is not None and job.precision.master != job.precision.params:
            items.append(
                sized("optimizer", f"main parameters ({which})", numel, job.precision.master, shards=shards)
            )
        for moment in ("exp_avg", "exp_avg_sq") if job.optimizer.name.startswith("adam") else ():
            items.append(sized("optimizer", f"{moment} ({which})", numel, job.optimizer.state, shards=shards))
    return items


def _shards(job: Job, expert: bool) -> int:
    if job.engine.zero_stage == 0:
        return 1
    layout = job.layout
    return layout.expert_dp if expert else layout.dp * layout.cp


def _buffers(job: Job, graph: Graph, rank: Rank, context: Context, fused: bool) -> list[Item]:
    """Batch, masks, the gather buffer and TE's dummy gradients: small, but they show on small models."""
    data = job.data
    tokens = data.seq_len * data.micro_batch
    items = [
        Item(
            category="input",
            what="token ids, labels, loss mask, positions",
            bytes=round_up(tokens * (8 + 8 + 4 + 8)),
            formula=f"{tokens} tokens x (8 + 8 + 4 + 8) B",
            lives="one micro-batch",
        )
    ]
    if flag(job.engine.options, "create_attention_mask_in_dataloader", True):
        items.append(
            Item(
                category="input",
                what="attention mask made by the data loader",
                bytes=round_up(data.micro_batch * data.seq_len**2),
                formula=f"micro-batch {data.micro_batch} x seq {data.seq_len}^2 x 1 B (bool)",
                lives="one micro-batch",
            )
        )
    if context.sp and context.tp > 1:
        whole = context.buffer("mpu", (BATCH, SEQ, "hidden"))
        items.append(
            Item(
                category="communication",
                what="global gather buffer (mpu)",
                bytes=round_up(whole.bytes),
                formula=f"{whole.formula}; tensor_parallel/layers.py keeps the largest gathered input",
                lives="from the first gather on",
            )
        )
    if fused:
        items += _dummy_gradients(rank, context)
    return items


def _dummy_gradients(rank: Rank, context: Context) -> list[Item]:
    """With fused accumulation autograd still wants a gradient: TE caches one dummy for each distinct weight shape.

    The shapes are those of the weights as Megatron holds them: q, k and v in one, gate and up in one.
    """
    shapes: dict[tuple[int, int], str] = {}
    blocks = {run.block.name: run.block for part in rank.chunks for run in part.runs if run.block.role != "embedding"}
    for block in blocks.values():
        fused: dict[str, tuple[int, int, str]] = {}
        for op in block.ops:
            if op.kind not in ("linear", "grouped_linear") or not op.params or op.name == "lm_head":
                continue
            weight = op.params[0].dims
            key = str(op.attrs.get("group") or op.name)
            if op.kind == "grouped_linear":  # one weight for each local expert, all of one shape
                rows, columns = context.size(weight[1]), context.size(weight[2])
            else:
                columns = context.numel(inner) if isinstance(inner := op.attrs["in"], tuple) else 1
                rows = context.numel(weight) // columns
            fused[key] = (fused[key][0] + rows if key in fused else rows, columns, op.name)
        shapes |= {(rows, columns): name for rows, columns, name in fused.values()}
    return [
        sized("gradients", f"dummy gradient like {name}", rows * columns, "bf16", why="TE get_dummy_wgrad, cached")
        for (rows, columns), name in shapes.items()
    ]


def _workspaces(job: Job, rank: Rank) -> list[Item]:
    """cuBLAS' workspace where torch itself multiplies (head, router, unfused attention), and Transformer Engine's own."""
    device = job.cluster.device
    found = []
    if _multiplies_in_torch(job, rank):
        found.append(overheads.cublas_workspace_bytes(device))
    if job.engine.options.get("transformer_impl", "transformer_engine") != "local":
        found.append(overheads.te_workspace_bytes(device))
    return [
        Item(
            category="workspace",
            what=one.what,
            bytes=round_up(one.bytes),
            formula=one.source,
            provenance=one.provenance,
            lives="from the first matmul on",
        )
        for one in found
    ]


def _multiplies_in_torch(job: Job, rank: Rank) -> bool:
    local = job.engine.options.get("transformer_impl") == "local"
    unfused = job.attention in ("eager", "math")
    return rank.last or local or unfused or any(param.expert for param in rank.params)


# -- the step


def _step(job: Job, graph: Graph, rank: Rank, replayer: Replayer, rule: GradRule) -> Node:
    wrap = Wrap()
    stream = replayer.context.buffer("stream", STREAM)
    received, sent_grad = boundary(stream.bytes), boundary_grad(stream.bytes)
    loss, loss_grad = boundary(4), boundary_grad(4)
    programs: dict[tuple[str, int], Node] = {}

    def forward(index: int) -> Node:
        part = rank.chunks[index]
        inner = chunks.forward(replayer.elements(part), replayer, wrap, rule)
        before = [] if part.first else [alloc(received)]
        after = [] if part.last else [free(received)]  # sent on, then cut to one element (deallocate_output_tensor)
        return Sequence([*before, inner, *after])

    def backward(index: int) -> Node:
        part = rank.chunks[index]
        inner = chunks.backward(replayer.elements(part), replayer, wrap, rule)
        before = [free(loss), alloc(loss_grad)] if part.last else [alloc(sent_grad)]
        after = [] if part.first else [free(sent_grad)]
        return Sequence([*before, inner, *after])

    def cached(kind: str, index: int) -> Node:
        if (kind, index) not in programs:
            programs[kind, index] = forward(index) if kind == "F" else backward(index)
        return programs[kind, index]

    group = job.engine.options.get("microbatch_group_size_per_virtual_pipeline_stage")
    passes = scheduled(
        job.layout,
        rank.index,
        job.data.grad_accum,
        lambda index: cached("F", index),
        lambda index: cached("B", index),
        group_size=group if isinstance(group, int) else None,
    )
    if not rank.first and job.layout.vpp == 1 and job.data.grad_accum > 1:
        # schedules.py names the gradient that it sent until the next backward has made its own
        held = boundary_grad(stream.bytes)
        passes = Sequence([alloc(held), passes, free(held)])
    return Sequence([passes, _optimizer(job, rank)])


def _optimizer(job: Job, rank: Rank) -> Node:
    """FusedAdam has no temporaries; gradients that are not fp32 are first copied into fp32 main gradients."""
    if job.precision.grads == "fp32" or job.precision.master != "fp32":
        return Sequence([], "optimizer step")
    copies = [
        sized(
            "gradients",
            f"fp32 copy of the gradients ({'experts' if expert else 'dense'})",
            rank.numel(expert=expert),
            "fp32",
            shards=_shards(job, expert),
            lives="optimizer step until zero_grad",
        )
        for expert in (False, True)
        if rank.numel(expert=expert)
    ]
    return Sequence([*(alloc(item) for item in copies), *(free(item) for item in copies)], "optimizer step")


def _groups(job: Job) -> tuple[tuple[str, int], ...]:
    layout = job.layout
    sizes = {
        "world": layout.world,
        "dp": layout.dp * layout.cp,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "ep": layout.ep,
    }
    return tuple((name, size) for name, size in sizes.items() if size > 1)


