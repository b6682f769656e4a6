"""What advice tries beside what ``engines/changes.py`` knows: what costs little, what takes states off the host, less work."""

from __future__ import annotations

from collections.abc import Iterator

from ullage.engines.changes import Change
from ullage.engines.fsdp2.policy import keeps_whole_gradients
from ullage.job.job import Job
from ullage.postmortem.with_job import REPLICAS

EXPANDABLE = "engine.options.expandable_segments"
WORK = "data.seq_len"
_LOSSES = ("fused-linear", "chunked", "vocab-parallel-fused")


def others(job: Job) -> Iterator[Change]:
    """What costs nothing or little, before what ``freeing`` knows; and shards in place of replicas, which is another engine."""
    if not job.engine.options.get("expandable_segments"):
        yield {EXPANDABLE: True}
    if job.attention in ("eager", "math"):
        yield {"attention": "flash"}
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


def shorter(job: Job) -> Iterator[Change]:
    if job.data.seq_len % 2 == 0:
        yield {WORK: job.data.seq_len // 2}
