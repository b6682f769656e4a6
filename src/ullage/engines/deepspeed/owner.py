"""One data-parallel rank of a pipeline rank under stages 1 and 2: what it owns, and the buffers that its gradients go through."""

from __future__ import annotations

from ullage.engines.base import sized
from ullage.engines.deepspeed.options import Knobs
from ullage.engines.deepspeed.partition import Held, Own
from ullage.frozen import frozen
from ullage.job.job import Job
from ullage.memory.chunk import Replayer
from ullage.memory.program import Item
from ullage.memory.rank import Rank
from ullage.model.graph import Graph


@frozen
class Owner:
    """One data-parallel rank of a pipeline rank: what its gradients need."""

    job: Job
    graph: Graph
    rank: Rank
    held: Held
    knobs: Knobs
    replayer: Replayer
    owns: tuple[Own, ...]
    own: Item
    bucket: Item

    @property
    def offloads(self) -> bool:
        return self.job.offload.optimizer != "none"

    @property
    def sums_in_fp32(self) -> bool:
        return accumulates_in_fp32(self.job)

    @property
    def bucket_dtype(self) -> str:
        return bucket_dtype(self.job, self.knobs)

    @property
    def largest_slice(self) -> int:
        return max((own.largest_slice for own in self.owns), default=0)


def accumulates_in_fp32(job: Job) -> bool:
    return job.precision.grads == "fp32" and job.precision.params != "fp32"


def own_gradients(job: Job, held: Held, knobs: Knobs, owns: tuple[Own, ...]) -> Item:
    """Own gradients: every parameter that the partition touches in full; the partition alone where they are summed in fp32."""
    lives = "first reduction to the step"
    if accumulates_in_fp32(job):
        return sized("gradients", "own gradients", held.partition, "fp32", lives=lives)
    whole = sum(own.whole for own in owns)
    why = "every parameter that touches this rank's partition, whole"
    return sized("gradients", "own gradients", whole, knobs.grads, why=why, lives=lives)


def bucket_dtype(job: Job, knobs: Knobs) -> str:
    return job.precision.params if accumulates_in_fp32(job) else knobs.grads


def reduction_bucket(job: Job, knobs: Knobs) -> Item:
    copies = 2 if knobs.overlap_comm else 1
    return sized(
        "communication",
        "reduction buckets" if copies > 1 else "reduction bucket",
        copies * knobs.reduce_bucket,
        bucket_dtype(job, knobs),
        why="reduce_bucket_size, allocated whole" + (", twice with overlap_comm" if copies > 1 else ""),
        lives="first gradient of a backward to its end",
    )


def owner(job: Job, graph: Graph, rank: Rank, held: Held, knobs: Knobs, replayer: Replayer, index: int) -> Owner:
    """Rank ``index`` of the data-parallel group (experts have a smaller one: index modulo its size)."""
    owns = tuple(flat.own(index % flat.shards) for _, flat in held.flats)
    return Owner(
        job=job,
        graph=graph,
        rank=rank,
        held=held,
        knobs=knobs,
        replayer=replayer,
        owns=owns,
        own=own_gradients(job, held, knobs, owns),
        bucket=reduction_bucket(job, knobs),
    )
