"""What Megatron-Core keeps on one rank, and when.

Sources: megatron/core/distributed/param_and_grad_buffer.py (buffers), megatron/core/optimizer (main parameters, moments),
megatron/core/pipeline_parallel/schedules.py (what is freed after a send), TransformerEngine pytorch/module/base.py (workspaces).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ullage.engines.base import Account, context_of, flag, shard, sized
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
from ullage.units import KIB


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
    states = _states(job, rank)
    dummies = _dummy_gradients(rank, context) if fused else []
    others = [*_buffers(job, context), *_workspaces(job, rank)]
    static = [*(item for one in states for item in one.all), *dummies, *others]
    return Account(
        static=tuple((item, 1) for item in static if item.bytes),
        late=(*dummies, *(item for one in states for item in one.moments)),
        load=_load(states, others),
        step=_step(job, graph, rank, replayer, rule),
        groups=_groups(job),
    )


def _recompute_group(job: Job) -> int:
    if job.engine.options.get("recompute_method") == "uniform":
        layers = job.engine.options.get("recompute_num_layers", 1)
        return layers if isinstance(layers, int) else 1
    return 1


# -- states


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """Model states of one kind of parameter (dense or experts), in the order in which they are made."""

    loose: Item  # parameters as the modules first hold them, before the buffers replace them
    parameters: Item
    gradients: Item
    main: Item | None
    moments: tuple[Item, ...]

    @property
    def all(self) -> list[Item]:
        return [self.parameters, self.gradients, *([self.main] if self.main else []), *self.moments]


def _states(job: Job, rank: Rank) -> list[_States]:
    """Parameters and main gradients whole; main parameters and moments over the data-parallel group with the distributed optimizer.

    Expert parameters have buffers and a data-parallel group of their own.
    """
    found = []
    for expert in (False, True):
        tensors = [local.numel for local in rank.params if local.expert == expert for _ in range(local.copies)]
        if not tensors:
            continue
        numel = sum(tensors)
        which = "experts" if expert else "dense"
        shards = _shards(job, expert)
        pieces = shard(tensors, shards)
        precision = job.precision
        two_copies = precision.master is not None and precision.master != precision.params
        adam = job.optimizer.name.startswith("adam")
        found.append(
            _States(
                loose=sized("parameters", f"parameters of the modules ({which})", numel, precision.params, pieces=tensors),
                parameters=sized("parameters", f"parameters ({which})", numel, precision.params),
                gradients=sized("gradients", f"main gradients ({which})", numel, precision.grads, why="never sharded"),
                main=sized("optimizer", f"main parameters ({which})", numel, precision.master or "", shards=shards, pieces=pieces)
                if two_copies
                else None,
                moments=tuple(
                    sized("optimizer", f"{moment} ({which})", numel, job.optimizer.state, shards=shards, pieces=pieces)
                    for moment in (("exp_avg", "exp_avg_sq") if adam else ())
                ),
            )
        )
    return found


def _load(states: list[_States], others: list[Item]) -> Node:
    """Modules make their parameters; DDP's buffers replace them; the optimizer copies its shard."""
    buffers = [node for one in states for node in (alloc(one.parameters), alloc(one.gradients))]
    return Sequence(
        [
            *(alloc(one.loose) for one in states),
            *buffers,
            *(free(one.loose) for one in states),
            *(alloc(one.main) for one in states if one.main),
            *(alloc(item) for item in others if item.bytes),
        ]
    )


def _shards(job: Job, expert: bool) -> int:
    if job.engine.zero_stage == 0:
        return 1
    layout = job.layout
    return layout.expert_dp if expert else layout.dp * layout.cp


def _buffers(job: Job, context: Context) -> list[Item]:
    """Batch, masks and the global gather buffer: small, but they show on small models."""
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
    if job.engine.options.get("transformer_impl") == "local" and job.attention in ("eager", "math"):
        scores = context.buffer("scores", (BATCH, "heads", SEQ, SEQ))
        items.append(
            Item(
                category="communication",
                what="global buffer (mpu) for the empty input of the score matmul",
                bytes=round_up(scores.bytes),
                formula=f"{scores.formula}; core/transformer/dot_product_attention.py takes it from the global buffer",
                lives="from the first attention on",
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
    """cuBLAS' workspaces where torch itself multiplies, and Transformer Engine's own.

    torch keeps one cuBLAS workspace for each thread's handle: the main thread's forward and autograd's backward have one each.
    """
    device = job.cluster.device
    items = []
    if _multiplies_in_torch(job, rank):
        deterministic = flag(job.engine.options, "deterministic_mode", False)
        found = overheads.cublas_workspace_bytes(device, hopper_only=_before(job, BLACKWELL_WORKSPACE_SINCE))
        size = DETERMINISTIC_WORKSPACE_BYTES if deterministic else found.bytes
        why = "CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic mode asks for" if deterministic else found.source
        items += [_workspace(f"cuBLAS workspace of the {thread}", size, why, found.provenance) for thread in THREADS]
    if job.engine.options.get("transformer_impl", "transformer_engine") != "local":
        found = overheads.te_workspace_bytes(device)
        items.append(_workspace(found.what, found.bytes, found.source, found.provenance))
        if job.engine.options.get("moe_grouped_gemm") and any(param.expert for param in rank.params):
            many = overheads.te_workspace_bytes(device, streams=GROUPED_GEMM_STREAMS)
            items.append(_workspace("Transformer Engine grouped GEMM workspaces", many.bytes, many.source, many.provenance))
    return items


def _workspace(what: str, size: int, formula: str, provenance: str) -> Item:
    return Item(
        category="workspace",
        what=what,
        bytes=round_up(size),
        formula=formula,
        provenance=provenance,
        lives="from the first matmul on",
    )


GROUPED_GEMM_STREAMS = 4  # TransformerEngine pytorch/cpp_extensions/gemm.py: one workspace for each compute stream
THREADS = ("main thread", "autograd thread")
DETERMINISTIC_WORKSPACE_BYTES = 8 * 4096 * KIB  # :4096:8 is eight buffers of 4096 KiB
BLACKWELL_WORKSPACE_SINCE = (0, 16)  # Megatron-Core releases that ship with a torch that knows Blackwell's larger workspace


def _before(job: Job, release: tuple[int, int]) -> bool:
    """Whether the job runs an older Megatron-Core than ``release``; the newest where it names none."""
    if job.stack_version is None:
        return False
    parts = re.findall(r"\d+", job.stack_version)[:2]
    return tuple(int(part) for part in parts) < release


def _multiplies_in_torch(job: Job, rank: Rank) -> bool:
    """Head, router and unfused attention call torch's matmuls; under Transformer Engine nothing else does."""
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
