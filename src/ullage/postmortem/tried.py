"""What advice tries beside what ``engines/changes.py`` knows: what costs little, what takes states off the host, less work."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.engines.changes import Change
from ullage.engines.fsdp2.policy import keeps_whole_gradients
from ullage.frozen import replace
from ullage.hardware.cluster import Cluster
from ullage.job.job import Job
from ullage.job.write import cluster_to_dict
from ullage.postmortem.with_job import REPLICAS

EXPANDABLE = "engine.options.expandable_segments"
WORK = "data.seq_len"
MACHINE = "cluster"
_MOST_IN_A_NODE = 8
_LOSSES = ("fused-linear", "chunked", "vocab-parallel-fused")


def others(job: Job) -> Iterator[Change]:
    """What costs nothing or little, before what ``freeing`` knows; and shards in place of replicas, which is another engine."""
    if not job.engine.options.get("expandable_segments"):
        yield {EXPANDABLE: True}
    if job.attention in ("eager", "math"):
        yield {"attention": "flash"}
    if job.engine.name == "deepspeed" and job.engine.zero_stage == 0:
        yield {"engine.zero_stage": 2, "offload.optimizer": "cpu"}
    if keeps_whole_gradients(job):
        yield {"engine.options.sync_each_batch": True}
    for loss in _LOSSES:
        if job.loss.kind == "full":
            yield {"loss": loss}
    if job.engine.name in REPLICAS and job.layout.dp > 1:
        mixed = f"{job.precision.compute}-mixed" if job.precision.autocast else None
        yield {"engine.name": "fsdp2", "engine.zero_stage": 3} | ({"precision": mixed} if mixed else {})


def off_host(job: Job) -> Iterator[Change]:
    """Blocks that are not pinned are not rounded up to powers of two; then fewer bytes for each parameter; then the card."""
    if job.offload.optimizer != "none" or job.offload.params != "none":
        yield {"engine.options.pin_memory": False}
        yield {"precision": "bf16"}
        yield {"offload.params": "none"}
        yield {"offload.optimizer": "none", "offload.params": "none"}


def more_gpus(job: Job) -> Iterator[Change]:
    """Two, four and eight times as many that share the states, of the same batch where its micro-batches can be shared out.

    Under Megatron they are tensor parallel.
    """
    for times in (2, 4, 8):
        change: Change = {MACHINE: cluster_to_dict(_larger(job.cluster, times))}
        if job.engine.name == "megatron":
            yield change | {"layout.tp": job.layout.tp * times}
            continue
        change["layout.dp"] = job.layout.dp * times
        if job.data.grad_accum % times == 0:
            change["data.grad_accum"] = job.data.grad_accum // times
        if job.engine.name in ("single", *REPLICAS):
            change["engine.name"] = "fsdp2"
        if job.engine.zero_stage != 3:
            change["engine.zero_stage"] = 3
        yield change


def _larger(cluster: Cluster, times: int) -> Cluster:
    if cluster.nodes == 1 and cluster.gpus_per_node * times <= _MOST_IN_A_NODE:
        return replace(cluster, gpus_per_node=cluster.gpus_per_node * times)
    return replace(cluster, nodes=cluster.nodes * times)


def shorter(job: Job) -> Iterator[Change]:
    if job.data.seq_len % 2 == 0:
        yield {WORK: job.data.seq_len // 2}
