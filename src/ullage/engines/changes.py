"""Changes of a job that free memory, in the order of what they cost in speed: one at a time, then in pairs, then in threes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

from ullage.engines.estimate import Estimate, estimate
from ullage.engines.reach import OFFLOADS
from ullage.errors import UllageError
from ullage.job.job import Job
from ullage.job.read import read_job
from ullage.job.write import job_to_dict

Change = dict[str, object]
"""Dotted job key -> value, as ``--set`` has it."""

_STEADY_BUCKET = 50_000_000
"""Elements: a tenth of DeepSpeed's default bucket; 100 MB of 16-bit gradients still fill a link."""
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
_SHARDING = ("deepspeed", "fsdp1", "fsdp2")


def combined(job: Job, possible: Callable[[Change], bool]) -> Iterator[tuple[Change, ...]]:
    """Every single change that is possible, then every pair of them, then every three."""
    singles = [change for change in freeing(job) if possible(change)]
    for count in (1, 2, 3):
        for some in combinations(singles, count):
            keys = [key for change in some for key in change]
            if len(keys) == len(set(keys)):
                yield some


def merged(some: Iterable[Change]) -> Change:
    return {key: value for change in some for key, value in change.items()}


def freeing(job: Job) -> Iterator[Change]:
    """Each change by itself, what costs least speed first."""
    yield from _buckets(job)
    yield from _stages(job)
    yield from _micro_batches(job)
    if job.recompute.kind != "full":
        yield {"recompute": "full"}
    yield from _offloads(job)


def _buckets(job: Job) -> Iterator[Change]:
    large: Change = {
        f"engine.options.{name}": _STEADY_BUCKET
        for name in _BUCKETS
        if isinstance(value := job.engine.options.get(name), int | float) and value > 10 * _STEADY_BUCKET
    }
    if large:
        yield large


def _stages(job: Job) -> Iterator[Change]:
    """The next stages of a sharding engine; a smaller reshard group has no place here, it only costs memory."""
    if job.engine.name in _SHARDING and job.layout.dp > 1:
        for stage in range(job.engine.zero_stage + 1, 4):
            if job.engine.name == "deepspeed" or stage == 3:
                yield {"engine.zero_stage": stage}
    elif job.engine.name == "megatron" and job.engine.zero_stage == 0 and job.layout.dp > 1:
        yield {"engine.zero_stage": 1}


def _micro_batches(job: Job) -> Iterator[Change]:
    """Smaller micro-batches, as many more of them: the step stays the same."""
    micro = job.data.micro_batch
    while micro % 2 == 0:
        micro //= 2
        yield {"data.micro_batch": micro, "data.grad_accum": job.data.grad_accum * job.data.micro_batch // micro}


def _offloads(job: Job) -> Iterator[Change]:
    known = OFFLOADS.get(job.engine.name, ())
    sharded = job.engine.name not in ("deepspeed", "megatron") or job.engine.zero_stage >= 1
    if "optimizer" in known and job.offload.optimizer == "none" and sharded:
        change: Change = {"offload.optimizer": "cpu"}
        if job.engine.name in ("fsdp1", "fsdp2"):
            change["offload.params"] = "cpu"
        if job.engine.name == "megatron":  # its command line wants both, and then the main parameters go too
            change["engine.options.use_precision_aware_optimizer"] = True
        yield change
    if (
        "params" in known
        and job.offload.params == "none"
        and job.engine.name == "deepspeed"
        and job.engine.zero_stage == 3
    ):
        yield {"offload.optimizer": "cpu", "offload.params": "cpu"}
    if job.engine.name == "deepspeed" and job.engine.zero_stage in (1, 2) and job.layout.dp == 1:
        # nobody to share with: parameters leave the card by the host alone, which takes stage 3
        yield {"engine.zero_stage": 3, "offload.optimizer": "cpu", "offload.params": "cpu"}


def changed(job: Job, change: dict[str, object]) -> Job | None:
    """The job with some keys changed; None where no such job exists."""
    document = job_to_dict(job)
    for key, value in change.items():
        section: object = document
        *above, name = key.split(".")
        for part in above:
            section = section[part] if isinstance(section, dict) else None
        assert isinstance(section, dict)
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    try:
        return read_job(document)
    except UllageError:
        return None


def answer_to(job: Job, change: dict[str, object]) -> Estimate | None:
    """The estimate of the job with some keys changed; None where it does not exist or is not modelled."""
    other = changed(job, change)
    if other is None:
        return None
    try:
        return estimate(other)
    except UllageError:
        return None
