"""What advice tries beside what ``engines/changes.py`` knows: what costs little, what takes states off the host, another run than the one
that failed."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.engines.changes import Change
from ullage.engines.fsdp2.policy import keeps_whole_gradients
from ullage.frozen import replace
from ullage.hardware.cluster import Cluster
from ullage.job.job import Job
from ullage.job.write import cluster_to_dict
from ullage.postmortem.with_job import REPLICAS

FLASH_CAPABILITY = (8, 0)
"""Of a device that torch's flash kernels run on (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
EXPANDABLE = "engine.options.expandable_segments"
WORK = "data.seq_len"
MACHINE = "cluster"
EIGHT_BIT = "optimizer"
WEIGHTS = "precision"
ADAPTERS = "lora"
QUANTISED = "lora.base"
CUT = "layout.cp"
ANOTHER_RUN = (WORK, MACHINE, CUT, EIGHT_BIT, WEIGHTS, ADAPTERS, QUANTISED)
"""Keys of what is no longer the same training by the same program on the same machine, and comes last."""
_MOST_IN_A_NODE = 8
_TIMES = (2, 4, 8)
_RANK = 16
"""Of adapters: what most of docs/oom.md's reports that have any take, within a factor of four."""
_LOSSES = ("fused-linear", "chunked", "vocab-parallel-fused")


def others(job: Job) -> Iterator[Change]:
    """What costs nothing or little, before what ``freeing`` knows; and shards in place of replicas, which is another engine."""
    if not job.engine.options.get("expandable_segments"):
        yield {EXPANDABLE: True}
    if job.attention in ("eager", "math"):
        capability = job.cluster.device.compute_capability
        yield {"attention": "mem-efficient" if capability is not None and capability < FLASH_CAPABILITY else "flash"}
    if job.engine.name == "deepspeed" and job.engine.zero_stage == 0:
        yield {"engine.zero_stage": 2, "offload.optimizer": "cpu"}
    if keeps_whole_gradients(job):
        yield {"engine.options.sync_each_batch": True}
    if job.optimizer.impl != "fused":
        yield {"optimizer.impl": "fused"}
    for loss in _LOSSES:
        if job.loss.kind == "full":
            yield {"loss": loss}
    if job.engine.name in REPLICAS and job.layout.dp > 1:
        mixed = f"{job.precision.compute}-mixed" if job.precision.autocast else None
        yield {"engine.name": "fsdp2", "engine.zero_stage": 3} | ({"precision": mixed} if mixed else {})


def cut(job: Job) -> Iterator[Change]:
    """Sequences shared out among ranks, as many of them in a step as before: between Megatron's layers, or everywhere."""
    layout = job.layout
    if job.engine.name == "megatron" and layout.tp > 1 and not layout.sp:
        yield {"layout.sp": True}
    if layout.dp % 2 == 0:
        yield _context_parallel(job) | {"layout.dp": layout.dp // 2, "data.grad_accum": 2 * job.data.grad_accum}
    elif job.engine.name == "single":
        yield _context_parallel(job) | {
            MACHINE: cluster_to_dict(_larger(job.cluster, 2)),
            "engine.name": "fsdp2",
            "engine.zero_stage": 3,
        }


def _context_parallel(job: Job) -> Change:
    change: Change = {CUT: 2 * job.layout.cp}
    return change | {"layout.cp_kind": "ulysses"} if job.engine.name == "deepspeed" else change


def learnt_otherwise(job: Job) -> Iterator[Change]:
    """What changes what is learnt: moments in 8 bits, weights in 16, adapters in place of all parameters, a frozen base in 4 bits."""
    if job.optimizer.name == "adamw" and job.optimizer.state == "fp32":
        yield {EIGHT_BIT: "adamw-8bit"}
    if job.precision.params == "fp32" and job.precision.compute == "bf16":
        yield {WEIGHTS: "bf16"}
    if job.lora is None:
        yield {ADAPTERS: {"rank": _RANK, "targets": "all-linear"}}
    elif job.lora.base == "bf16":
        yield {QUANTISED: "nf4"}


def off_host(job: Job) -> Iterator[Change]:
    """Blocks that are not pinned are not rounded up to powers of two; then fewer bytes for each parameter; then the card."""
    if job.offload.optimizer != "none" or job.offload.params != "none":
        megatron = job.engine.name == "megatron"
        pinning = ("pin_cpu_grads", "pin_cpu_params") if megatron else ("pin_memory",)
        yield {f"engine.options.{name}": False for name in pinning}
        yield {WEIGHTS: "bf16"}
        yield {"offload.params": "none"}
        yield {"offload.optimizer": "none", "offload.params": "none"}


def more_nodes(job: Job) -> Iterator[Change]:
    """Two, four and eight times as many, each with memory of its own for its share of the states."""
    for times in _TIMES:
        nodes = replace(job.cluster, nodes=job.cluster.nodes * times)
        yield {MACHINE: cluster_to_dict(nodes)} | _more_ranks(job, times)


def more_gpus(job: Job) -> Iterator[Change]:
    """Two, four and eight times as many that share the states. Under Megatron they are tensor parallel."""
    for times in _TIMES:
        change: Change = {MACHINE: cluster_to_dict(_larger(job.cluster, times))}
        if job.engine.name == "megatron":
            yield change | {"layout.tp": job.layout.tp * times}
            continue
        change |= _more_ranks(job, times)
        if job.engine.name in ("single", *REPLICAS):
            change["engine.name"] = "fsdp2"
        if job.engine.zero_stage != 3:
            change["engine.zero_stage"] = 3
        yield change


def _more_ranks(job: Job, times: int) -> Change:
    """Of the same batch where its micro-batches can be shared out."""
    change: Change = {"layout.dp": job.layout.dp * times}
    shared = job.data.grad_accum % times == 0
    return change | {"data.grad_accum": job.data.grad_accum // times} if shared else change


def _larger(cluster: Cluster, times: int) -> Cluster:
    if cluster.nodes == 1 and cluster.gpus_per_node * times <= _MOST_IN_A_NODE:
        return replace(cluster, gpus_per_node=cluster.gpus_per_node * times)
    return replace(cluster, nodes=cluster.nodes * times)


def shorter(job: Job) -> Iterator[Change]:
    if job.data.seq_len % 2 == 0:
        yield {WORK: job.data.seq_len // 2}
