"""What Megatron-Core holds beside the states: batch, masks, gather buffer, dummy gradients, library workspaces.

Sources: megatron/core/tensor_parallel/layers.py, TransformerEngine pytorch/module/base.py and cpp_extensions/gemm.py.
"""

from __future__ import annotations

from dataclasses import replace

from ullage.engines.base import cublas_workspaces, flag, sized, workspace
from ullage.hardware import overheads
from ullage.job.job import Job
from ullage.kernels import megatron_moe
from ullage.kernels.megatron_common import before
from ullage.kernels.step import Context
from ullage.memory.program import Item, round_up
from ullage.memory.rank import Rank
from ullage.model.graph import BATCH, SEQ
from ullage.units import KIB


def buffers(job: Job, context: Context) -> list[Item]:
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
    gathered = []
    if context.sp and context.tp > 1:
        gathered.append(context.buffer("mpu", (BATCH, SEQ, "hidden")))
    if megatron_moe.gathers(context):
        gathered.append(megatron_moe.everybodys(context, "mpu", "tokens of all ranks that share experts"))
    if gathered:
        whole = max(gathered, key=lambda one: one.bytes)
        items.append(
            Item(
                category="communication",
                what="global gather buffer (mpu)",
                bytes=round_up(whole.bytes),
                formula=f"{whole.formula}; tensor_parallel/utils.py keeps the largest that was asked for",
                lives="from the first gather on",
            )
        )
    return items


def dummy_gradients(rank: Rank, context: Context) -> list[Item]:
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
            if not op.params[0].trainable:
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


def workspaces(job: Job, rank: Rank) -> list[Item]:
    """cuBLAS' workspaces where torch itself multiplies, and Transformer Engine's own."""
    device = job.cluster.device
    items = []
    if _multiplies_in_torch(job, rank):
        deterministic = flag(job.engine.options, "deterministic_mode", False)
        found = overheads.cublas_workspace_bytes(
            device, hopper_only=before(job.stack_version, BLACKWELL_WORKSPACE_SINCE)
        )
        if deterministic:
            why = "CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic mode asks for"
            found = replace(found, bytes=DETERMINISTIC_WORKSPACE_BYTES, source=why)
        items += cublas_workspaces(found)
    local = job.engine.options.get("transformer_impl") == "local"
    experts = any(param.expert for param in rank.params)
    if not local or (experts and _router_in_engine(job)):
        userbuffers = flag(job.engine.options, "tp_comm_overlap", False) and job.layout.tp > 1
        streams = 1
        if userbuffers:
            streams = USERBUFFER_STREAMS + (not before(job.stack_version, USERBUFFERS_APART_SINCE))
        items.append(workspace(overheads.te_workspace_bytes(device, streams=streams)))
        if job.engine.options.get("moe_grouped_gemm") and experts and not local:
            many = overheads.te_workspace_bytes(device, streams=GROUPED_GEMM_STREAMS)
            items.append(workspace(replace(many, what="Transformer Engine grouped GEMM workspaces")))
    return items


USERBUFFER_STREAMS = 3  # _NUM_MAX_UB_STREAMS: what overlapped tensor-parallel communication multiplies with
USERBUFFERS_APART_SINCE = (0, 16)
"""Whose Transformer Engine, 2.10 and later, has the plain matmuls' workspace beside those three (cpp_extensions/gemm.py,
get_cublas_workspace: one for each of its arguments); before, initialize_ub made three of the one (module/base.py)."""
GROUPED_GEMM_STREAMS = 4  # TransformerEngine pytorch/cpp_extensions/gemm.py: one workspace for each compute stream
DETERMINISTIC_WORKSPACE_BYTES = 8 * 4096 * KIB  # :4096:8 is eight buffers of 4096 KiB
BLACKWELL_WORKSPACE_SINCE = (0, 18)
"""Megatron-Core releases whose torch knows Blackwell's larger workspace. Inferred from its functional tests on GB200: 48 MiB less is held
at 2aeaf56cb7, in the container 26.02, than since 5fe3f06658 of May 2026, which brought 26.04 (docker/.ngc_version.dev)."""


ROUTER_IN_ENGINE_SINCE = (0, 14)
"""Since June 2025 the router multiplies in Transformer Engine where it is installed, before local layers too
(core/transformer/moe/moe_utils.py, RouterGatingLinearFunction); release 0.13.0 has it, its candidates of before that not."""


def _router_in_engine(job: Job) -> bool:
    return not before(job.stack_version, ROUTER_IN_ENGINE_SINCE)


def _multiplies_in_torch(job: Job, rank: Rank) -> bool:
    """Head, older routers and unfused attention call torch's matmuls; under Transformer Engine nothing else does."""
    local = job.engine.options.get("transformer_impl") == "local"
    unfused = job.attention in ("eager", "math")
    router = any(param.expert for param in rank.params) and not _router_in_engine(job)
    return rank.last or local or unfused or router
